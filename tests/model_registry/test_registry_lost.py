"""A lost MLflow database is refused, and restored from its copy; promotions and rollbacks are in the evaluations."""

import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from rft_platform.common.digests import MANIFEST, THINNED
from rft_platform.common.errors import DamagedError, RegistryLostError, UserError
from rft_platform.common.files import write_sealed_json, write_text
from rft_platform.common.sqlite_files import backup_of
from rft_platform.config.home import Home
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.online.project import open_project
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, published, read, write
from rft_platform.rounds.releases.promotion import promote_version, roll_back
from rft_platform.rounds.reporting.run_log import record_training
from rft_platform.rounds.setup.connections import check_registry, connect_registry
from rft_platform.training.protocol import StepEvent, TrainResult
from tests.support.records import trained

ROUNDS, NO_OP = 5, 3  # round 3 trains nothing; rounds 2 and 5 are promoted


@pytest.fixture
def project(tmp_path: Path, empty_store: Path) -> Project:
    """A project of five rounds as they leave it: notes, checkpoints, and an MLflow that knows both."""
    home = Home(tmp_path / "home")
    home.root.mkdir(mode=0o700)  # whatever the umask: a command would report that it closes an open one
    model = {"model_path": str(tmp_path / "base")}
    buffer = {"batch_size": 2, "explorer_input": {"taskset": {"path": str(tmp_path / "tasks.jsonl")}}}
    write_text(home.config_file, yaml.safe_dump({"project": "paper", "name": "lost", "model": model, "buffer": buffer}))
    home.mlflow.mkdir()
    for database in (home.mlflow / "mlflow.db", home.root / "empty.db"):
        shutil.copy(empty_store, database)
    project = open_project(home)
    publish(project.store, Policy(str(tmp_path / "base"), 0, "digest-0", 0))
    for number in range(1, ROUNDS + 1):
        train_round(project, new_registry(project), number)
    return project


def new_registry(project: Project) -> ModelRegistry:
    """As a new process opens it."""
    registry = connect_registry(project)
    return ModelRegistry(
        registry.tracking_uri, registry.artifact_root, registry.project, registry.model_name, registry._noted
    )


def train_round(project: Project, registry: ModelRegistry, number: int) -> None:
    """What the phases of a round leave, without the weights."""
    store, parent = project.store, published(project.store, number - 1)
    lineage = {"round": number, "config_digest": "c", "judge_version": "j", "rollouts": {"a": "b"}}
    steps = [] if number == NO_OP else [StepEvent(2 * number + index, {"loss": 0.5 / number}) for index in range(2)]
    policy = Policy(parent.folder, parent.policy_version, parent.weights_digest, number, None, parent.model_version)
    if steps:
        folder = project.checkpoints / f"global_step_{2 * number}"
        policy = Policy(str(folder), 2 * number, f"digest-{number}", number)
        identity = {"policy_version": 2 * number, "weights_digest": f"digest-{number}", "lineage": lineage}
        origin = {"parent": parent.folder, "parent_version": parent.policy_version}
        write_sealed_json(folder / MANIFEST, {**identity, **origin, "files": {}})
    result = TrainResult(policy.folder, policy.policy_version, policy.weights_digest, len(steps), {}, {}, 0.0)
    odd = {"tool//errors": 1.0, "../../x/..": 2.0}  # names that MLflow refuses
    write(store, number, Judged(mean_reward=0.1 * number, seconds=1.0, figures={"workflow_metrics": odd}))
    made = trained(**asdict(result), step_events=steps, lineage=lineage)
    write(store, number, made)
    publish(store, policy)
    registered = record_training(project, registry, read(store, number), policy, made)
    promoted = number in (2, 5)
    if promoted:
        registry.promote(int(registered.model_version))
    write(store, number, RoundEvaluation(gate="", promoted=promoted, metrics={}))


def content(project: Project) -> tuple[object, ...]:
    """Everything that the platform reads of MLflow."""
    registry = new_registry(project)
    run = registry.training_run("lost")
    points = {
        key: [(point.step, point.value) for point in run.client.get_metric_history(run.run_id, key)]
        for key in sorted(run.client.get_run(run.run_id).data.metrics)
    }
    new = {"promoted_at", "logged_model"}  # times, and ids that MLflow assigns
    versions = [
        (found.version, found.folder, found.aliases, {k: v for k, v in found.tags.items() if k not in new})
        for found in registry.versions()
    ]
    models = [run.client.get_logged_model(found.tags["logged_model"]) for found in registry.versions()]
    linked = [(model.name, dict(model.tags), [(m.key, m.value, m.step) for m in model.metrics]) for model in models]
    return versions, points, linked


def test_a_lost_database_is_refused_and_not_created_again(project: Project) -> None:
    database = project.home.mlflow / "mlflow.db"
    database.unlink()
    for attempt in (lambda: check_registry(project), lambda: new_registry(project).prepare()):
        with pytest.raises(
            RegistryLostError, match=rf"{database} does not exist.*r0005/policy-policy.json names version 4"
        ):
            attempt()
    assert not database.exists()


def test_another_database_is_refused(project: Project, empty_store: Path) -> None:
    shutil.copy(empty_store, project.home.mlflow / "mlflow.db")
    for attempt in (lambda: check_registry(project), lambda: new_registry(project).champion()):
        with pytest.raises(RegistryLostError, match=r"does not know this version.*a copy is .*mlflow.db.backup"):
            attempt()
    registry = connect_registry(project)
    unchecked = ModelRegistry(registry.tracking_uri, None, registry.project, registry.model_name)
    unchecked.register_checkpoint(project.home.root, 1, {"weights_digest": "x"})
    publish(project.store, replace(published(project.store, 5), model_version="1"))
    with pytest.raises(RegistryLostError, match="has other weights under this version"):
        new_registry(project).prepare()


@pytest.mark.slow
def test_a_rollback_is_recorded_in_the_evaluation(project: Project) -> None:
    assert roll_back(project, new_registry(project)).version == 2
    with pytest.raises(UserError, match="model version 2 is the first champion; there is no previous champion"):
        roll_back(project, new_registry(project))
    withdrawn = read(project.store, 5).evaluated
    assert withdrawn.promoted is False and withdrawn.rolled_back_at and read(project.store, 2).evaluated.promoted


@pytest.mark.slow
def test_a_rollback_to_a_version_without_weights_is_not_recorded(project: Project) -> None:
    write_text(project.checkpoints / "global_step_4" / THINNED, "{}")
    with pytest.raises(DamagedError, match=r"its weights were removed to make room"):
        roll_back(project, new_registry(project))
    assert read(project.store, 5).evaluated.promoted
    assert new_registry(project).champion().version == 4


@pytest.mark.slow
def test_a_promotion_by_hand_is_recorded_in_the_evaluation(project: Project) -> None:
    roll_back(project, new_registry(project))
    for version, why in ((10, "was not evaluated: run `rft eval --all`"), (7, "registered are 2, 4, 8, 10"),
                         (2, "is older than the champion")):  # fmt: skip
        with pytest.raises(UserError, match=why):
            promote_version(project, new_registry(project), version, "by hand")
    measured = EvaluationResult(5, 10, 1, "tasks", 1, 1.0, 0, 1.0, "m", None, None, 0.5, 0, 1, 0.0, 1.0)
    write(project.store, 5, replace(read(project.store, 5).evaluated, results=[measured]))
    assert promote_version(project, new_registry(project), 10, "by hand").version == 4
    evaluated = read(project.store, 5).evaluated
    assert (evaluated.promoted, evaluated.promoted_because, evaluated.rolled_back_at) == (True, "by hand", None)
    assert new_registry(project).champion().version == 4
    assert roll_back(project, new_registry(project)).version == 2


@pytest.mark.slow
def test_a_rollback_that_was_killed_goes_back_one_version_when_repeated(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: ModelRegistry) -> None:
        raise KeyboardInterrupt

    train_round(project, new_registry(project), ROUNDS + 1)
    newest = int(published(project.store, ROUNDS + 1).model_version or 0)
    new_registry(project).promote(newest)
    write(project.store, ROUNDS + 1, RoundEvaluation(gate="", promoted=True, metrics={}))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ModelRegistry, "rollback", killed)
        roll_back(project, new_registry(project))
    assert roll_back(project, new_registry(project)).version == 4


@pytest.mark.slow
def test_a_lost_database_is_restored_from_its_copy(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is as new as the newest promotion: a restored one numbers the next version as the lost one would."""
    before, database = content(project), project.home.mlflow / "mlflow.db"
    restored = shutil.copy(backup_of(database), database.with_name("restored.db"))
    database.unlink()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{restored}")  # MLflow keeps a deleted file open in a process

    assert content(project) == before
    train_round(project, new_registry(project), ROUNDS + 1)
    assert published(project.store, ROUNDS + 1).model_version == "5"


@pytest.mark.slow
def test_the_commands_name_the_copy_and_roll_back(project: Project) -> None:
    database = project.home.mlflow / "mlflow.db"
    database.unlink()
    refused = rft(project, "trace", "models:/paper-lost@champion")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"restore MLflow's database (a copy is {database}.backup)" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not database.exists()
    shutil.copy(backup_of(database), database)
    back = rft(project, "models", "rollback").stdout
    now, before = "policy version 4 (model version 2)", "policy version 10 (model version 4)"
    assert back == f"paper-lost: champion is {now} again, instead of {before}\n"
    first = rft(project, "models", "rollback")
    assert (first.returncode, first.stdout) == (2, "")
    assert "model version 2 is the first champion; there is no previous champion" in first.stderr
    wrong = rft(project, "models", "promote", "3").stderr
    assert "no registered policy version 3; registered are 2, 4, 8, 10: give one of them" in wrong
    assert "; model version 3 is policy version 8" in wrong
    measured = EvaluationResult(5, 10, 1, "tasks", 1, 1.0, 0, 1.0, "m", None, None, 0.5, 0, 1, 0.0, 1.0)
    write(project.store, 5, replace(read(project.store, 5).evaluated, results=[measured]))
    assert rft(project, "models", "promote", "10").stdout == f"paper-lost: champion is {before} from now on\n"


def rft(project: Project, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RFT_HOME": str(project.home.root)}
    call = [sys.executable, "-m", "rft_platform", *command]
    return subprocess.run(call, env=environment, capture_output=True, text=True, timeout=120)
