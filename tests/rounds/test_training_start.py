"""Where a training starts after the gate refused the version before: from the version that serves, or from that one."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from rft_platform.common.digests import MANIFEST, digest_weights
from rft_platform.common.errors import TrainerError, UserError
from rft_platform.common.files import write_sealed_json
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.findings import refuse
from rft_platform.config.home import Home
from rft_platform.evaluation.metrics import pass_rate
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.model_registry.models import DIGEST_TAG, RegisteredModel
from rft_platform.online.pages.routes import last_round
from rft_platform.online.project import open_project as opened
from rft_platform.online.project import project_in
from rft_platform.online.releases.commands import MOST_FAILURES, ReleaseCommands, decide
from rft_platform.online.releases.versions import release_commands
from rft_platform.online.traffic.alerts import TrafficFigures, alerts_of
from rft_platform.online.traffic.database import FIRST_IMPORTED
from rft_platform.online.traffic.incoming import ENGINE, TEMPLATE_HASH, NewCall, NewFeedback
from rft_platform.online.traffic.project_traffic import traffic_store
from rft_platform.rounds.explore import snapshot_for
from rft_platform.rounds.maintenance.checkpoint_retention import in_use, needed_to_repeat
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Explored,
    Policy,
    RoundEvaluation,
    RowSelection,
    Start,
    Trained,
    parent_of,
    publish,
    read,
    required,
    steps_before,
    withdraw,
    write,
)
from rft_platform.rounds.releases.promotion import against_champion
from rft_platform.rounds.releases.training_start import newest_refused, refusal_hint, settle_start
from rft_platform.rounds.reporting.lineage import trace_checkpoint
from rft_platform.rounds.round import Round
from rft_platform.rounds.setup.connections import connect_registry
from rft_platform.rounds.train import train_request
from rft_platform.run.round_lines import describe_round, round_line
from rft_platform.training.protocol import OnRepeat, StepEvent, TrainRequest, TrainResult
from rft_platform.training.service.trainer_client import TrainerClient, find_or_start_trainer
from tests.support.records import trained
from tests.training.conftest import make_round

if TYPE_CHECKING:
    from rft_platform.training.distributed import Ranks

TRAFFIC = {"trainer_input": {"experience_buffer": {"storage_type": "sql"}}}


def open_project(
    folder: Path, *, online: bool = True, model: Path | None = None, gated: bool = True, **sections: Any
) -> Project:
    """A project with held-out tasks, so that the gate decides which versions are released; not ``gated``: without."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(f'{{"question": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(4)))
    inputs: dict[str, Any] = {"eval_tasksets": [{"name": "held-out", "path": str(tasks)}]} if gated else {}
    if not online:
        inputs["taskset"] = {"path": str(tasks)}
    config = {
        "project": "shop", "name": "helper", "checkpoint_root_dir": str(folder / "checkpoints"),
        "model": {"model_path": str(model or folder), "max_model_len": 64, "max_response_tokens": 4},
        "algorithm": {"algorithm_type": "reinforce++", "optimizer": {"lr": 1.0e-3}},
        "buffer": {"train_batch_size": 4, "explorer_input": inputs, **(TRAFFIC if online else {"batch_size": 4})},
        "synchronizer": {"sync_interval": 2 if online else 1},
        **sections,
    }  # fmt: skip
    home = folder / "home"
    home.mkdir(mode=0o700, exist_ok=True)
    (home / "rft.yaml").write_text(yaml.safe_dump(config))
    return opened(Home(home))


def scored(number: int, share: float) -> EvaluationResult:
    """An evaluation of 40 tasks, of which this share passed."""
    count = 40
    rewards = {f"task-{task}": [float(task < round(share * count))] for task in range(count)}
    return EvaluationResult(
        round=number, policy_version=8 * number, tasks=count, tasks_digest="t", sampled_n=1, temperature=1.0, seed=1,
        pass_threshold=0.5, measured_by="m", sampled=pass_rate(rewards), greedy=None, mean_reward=share,
        failed_runs=0, completion_tokens=1, truncated_share=0.0, seconds=1.0, scores={"sampled": rewards},
    )  # fmt: skip


def end_round(
    project: Project, number: int, version: int, *, passed: bool | None, steps: int = 8, score: float = 0.5
) -> None:
    """A round that ended with ``version``, which the gate let pass or refused; None: it was not evaluated."""
    store = project.store
    publish(store, Policy(f"global_step_{version}", version, f"digest {version}", round=number))
    if number:
        write(store, number, trained(steps=steps, policy_version=version))
    results = [] if passed is None else [scored(number, score)]
    write(store, number, RoundEvaluation("decided", promoted=bool(passed), gate_passed=passed, results=results))


def after_a_refusal(folder: Path, **settings: Any) -> Project:
    """Version 8 passed, version 16 was refused; round 3 comes next."""
    project = open_project(folder, **settings)
    end_round(project, 0, 0, passed=None)
    end_round(project, 1, 8, passed=True)
    end_round(project, 2, 16, passed=False)
    return project


def selected(project: Project, number: int) -> RowSelection:
    """The rows that a round's training took."""
    selection = read(project.store, number).selection()
    assert selection is not None
    return selection


def request_of(project: Project, number: int) -> TrainRequest:
    """The request of a round's training, on random rows."""
    rows, judged = make_round(number, groups=2, runs=2, number=number)
    project.store.write_rollouts(number, 0, rows)
    project.store.write_judged(number, "judge", judged)
    parent = parent_of(project.store, number)
    return train_request(project, parent, number, RowSelection(), "")


def test_a_training_starts_again_from_the_version_that_serves(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    project = after_a_refusal(tmp_path)
    assert settle_start(project, 3).policy_version == parent_of(project.store, 3).policy_version == 8
    said = "started again from version 8, because the gate refused version 16"
    assert f"r0003: the training {said}" in caplog.text
    request = request_of(project, 3)
    assert (request.parent_version, request.steps_before, request.counts_from) == (8, 16, 16)
    assert request.lineage["refused_versions"] == "16" and not request.fresh_optimizer
    end_round(project, 3, 24, passed=True)
    assert said in describe_round(round_line(project, 3)) and said in last_round(project)
    assert settle_start(project, 4).policy_version == 24 and not read(project.store, 4).has(Start)
    assert request_of(project, 4).steps_before is None


def test_the_start_is_settled_once(tmp_path) -> None:
    project = after_a_refusal(tmp_path)
    settle_start(project, 3)
    end_round(project, 2, 16, passed=True)  # evaluated again while round 3 trains
    assert settle_start(project, 3).policy_version == 8
    end_round(project, 3, 24, passed=False)
    withdraw(project.store, 3, Start)
    assert settle_start(project, 3).policy_version == 16, "a trained round keeps its parent"


@pytest.mark.parametrize(("choice", "parent"), [("continue", 16), ("restart", 8)])
def test_the_key_decides(tmp_path, choice: str, parent: int) -> None:
    project = after_a_refusal(tmp_path, evaluation={"after_refusal": choice})
    assert settle_start(project, 3).policy_version == parent


def test_an_offline_project_continues_unless_restart_is_set(tmp_path) -> None:
    project = after_a_refusal(tmp_path, online=False)
    assert snapshot_for(project, 3).policy_version == settle_start(project, 3).policy_version == 16
    other = tmp_path / "other"
    other.mkdir()
    project = after_a_refusal(other, online=False, evaluation={"after_refusal": "restart"})
    assert snapshot_for(project, 3).policy_version == settle_start(project, 3).policy_version == 8


def test_a_restart_needs_rounds_that_explore_with_the_version_that_they_train(tmp_path) -> None:
    chosen = {"evaluation": {"after_refusal": "restart"}, "synchronizer": {"sync_offset": 1}}
    settings = open_project(tmp_path, online=False, **chosen).settings
    with pytest.raises(UserError, match=r"evaluation\.after_refusal restart: each round has to explore"):
        refuse(settings_findings(settings, Machine(2, 0)))


def test_versions_that_were_not_evaluated_are_trained_further(tmp_path) -> None:
    project = after_a_refusal(tmp_path)
    end_round(project, 2, 16, passed=None)
    assert settle_start(project, 3).policy_version == 16


def test_the_first_version_was_refused(tmp_path) -> None:
    project = open_project(tmp_path)
    end_round(project, 0, 0, passed=None)
    end_round(project, 1, 8, passed=False)
    start = settle_start(project, 2)
    request = request_of(project, 2)
    assert (start.policy_version, request.counts_from, request.fresh_optimizer) == (0, 8, True)


def test_a_decision_of_a_person_counts_unless_it_chose_an_imported_version(tmp_path) -> None:
    project = after_a_refusal(tmp_path)
    store = release_commands(project).store
    store.serve(0, "rolled_back", "by hand")
    assert settle_start(project, 3).policy_version == 0
    for served, parent in ((16, 16), (FIRST_IMPORTED + 1, 8)):
        withdraw(project.store, 3, Start)
        store.serve(served, "promoted", "by hand")
        assert settle_start(project, 3).policy_version == parent


def with_a_canary(folder: Path, *, gated: bool = True) -> tuple[Project, ReleaseCommands]:
    """Version 8 serves; a canary of version 16 runs."""
    project = open_project(folder, gated=gated)
    for number, version in enumerate((0, 8, 16)):
        end_round(project, number, version, passed=True if gated and number else None)
    commands = release_commands(project)
    commands.promote(8)
    commands.canary(16)
    return project, commands


def withdraw_version(commands: ReleaseCommands, kind: str = "canary") -> None:
    """End the canary of version 16, or a test or a promotion after it, so that version 8 serves."""
    running = commands.store.running()
    assert running is not None
    if kind == "canary":
        assert decide(commands.store, running, MOST_FAILURES) == "rolled_back"
        return
    commands.promote(16)
    if kind == "ab":
        commands.promote(8)
        commands.ab_test(16)
    commands.roll_back(8)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("kind", "by"), [("canary", "canary 1"), ("ab", "A/B test 2"), ("by hand", "a roll-back")])
def test_a_training_starts_again_after_a_version_was_withdrawn(tmp_path, kind: str, by: str, gated: bool) -> None:
    project, commands = with_a_canary(tmp_path, gated=gated)
    assert settle_start(project, 3).policy_version == 16, "nothing is decided while the canary runs"
    withdraw_version(commands, kind)
    assert settle_start(project, 3).policy_version == 8
    assert read(project.store, 3).start.refused == [16]
    assert f"started again from version 8, because {by} withdrew version 16" in str(last_described(project, 3))
    end_round(project, 3, 24, passed=True if gated else None)
    assert settle_start(project, 4).policy_version == 24, "it descends from version 8"
    commands.promote(16)
    assert newest_refused(project) == []


def test_a_version_that_descends_from_a_withdrawn_one_is_not_trained_further(tmp_path) -> None:
    project, commands = with_a_canary(tmp_path)
    settle_start(project, 3)
    end_round(project, 3, 24, passed=True)  # while the canary of its parent runs
    withdraw_version(commands)
    assert settle_start(project, 4).policy_version == 8
    assert "version 24 descends from version 16, which canary 1 withdrew (2 in a row)" in last_described(project, 4)
    withdraw(project.store, 4, Start)
    commands.promote(24)
    withdraw(project.store, 4, Trained)
    assert settle_start(project, 4).policy_version == 24, "a decision chose it"


def test_a_rollback_skips_withdrawn_versions_and_their_descendants(tmp_path) -> None:
    project, commands = with_a_canary(tmp_path)
    settle_start(project, 3)
    end_round(project, 3, 24, passed=True)  # while the canary of its parent runs
    withdraw_version(commands)
    settle_start(project, 4)
    end_round(project, 4, 32, passed=True)
    commands.promote(32)
    assert commands.roll_back() == 8


def test_a_withdrawn_champion_is_not_the_one_to_beat(tmp_path) -> None:
    project, commands = with_a_canary(tmp_path)
    for number, share in ((1, 0.5), (2, 0.9), (3, 0.7)):
        end_round(project, number, 8 * number, passed=True, score=share)
    champion = RegisteredModel("shop-helper", 2, Path("m"), {DIGEST_TAG: "digest 16"})
    policy = replace(required(project.store, 3), model_version="3")

    def passes() -> tuple[bool, str]:
        decision = against_champion(project, Champion(champion), policy, scored(3, 0.7))[1]  # type: ignore[arg-type]
        return decision.passed, decision.reason

    assert not passes()[0]
    withdraw_version(commands)
    passed, reason = passes()
    assert passed and reason.startswith("sampled_pass 0.7000 against the served version's 0.5000 (policy version 8)")


def test_permitted_losses_do_not_add_up(tmp_path) -> None:
    """Each version is worse than the one before by less than the permitted loss."""
    project = open_project(tmp_path, evaluation={"gate": {"min_delta": -0.1, "confident": False}})
    decided = []
    for number, share in enumerate((0.6, 0.7, 0.625, 0.55, 0.6, 0.475)):
        end_round(project, number, 8 * number, passed=False, score=share)
        store = project.store
        promoted = [n for n in range(number) if read(store, n).evaluated.promoted] or [0]
        champion = RegisteredModel("shop-helper", 2, Path("m"), {DIGEST_TAG: f"digest {8 * promoted[-1]}"})
        policy = required(store, number)
        decision = against_champion(project, Champion(champion), policy, scored(number, share))[1]  # type: ignore[arg-type]
        end_round(project, number, 8 * number, passed=decision.passed, score=share)
        decided.append((number, decision.passed))
    assert decided[1:] == [(1, True), (2, True), (3, False), (4, True), (5, False)]
    assert decision.reason == (
        "sampled_pass 0.4750 against the best version's 0.7000 (policy version 8): needs 0.6000"
    )  # fmt: skip


class Champion:
    """A registry with one version, the champion."""

    def __init__(self, champion: RegisteredModel) -> None:
        self._champion = champion

    def champion(self) -> RegisteredModel:
        return self._champion

    def versions(self) -> list[RegisteredModel]:
        return [self._champion]


def test_without_a_saved_optimiser_state_the_optimiser_starts_fresh(tmp_path) -> None:
    project = after_a_refusal(tmp_path)
    folder = tmp_path / "unsaved"
    folder.mkdir()
    write_sealed_json(folder / MANIFEST, {"deferred_state": True})
    publish(project.store, replace(required(project.store, 1), folder=str(folder)))
    settle_start(project, 3)
    assert read(project.store, 3).start.fresh_optimizer
    assert request_of(project, 3).fresh_optimizer
    write(project.store, 3, trained(steps=8))
    assert "from version 8 with a fresh optimiser (its state was not saved), because the gate" in (
        round_line(project, 3).started_again or ""
    )


def test_version_numbers_are_unique_after_an_empty_round_and_a_restart(tmp_path) -> None:
    project = after_a_refusal(tmp_path)
    settle_start(project, 3)
    end_round(project, 3, 8, passed=True, steps=0)  # the weights of version 8 again
    assert (steps_before(project.store, 4), settle_start(project, 4).policy_version) == (16, 8)
    assert request_of(project, 4).counts_from == 16


def test_refusals_in_a_row_raise_an_alert_and_a_hint(tmp_path) -> None:
    project = after_a_refusal(tmp_path)
    for number in (3, 4, 5):
        assert refusal_hint(project) is None
        settle_start(project, number)
        end_round(project, number, 8 * (number + 4), passed=False)
    refused = newest_refused(project)
    assert [policy.round for policy in refused] == [5, 4, 3, 2]
    assert "the 4 newest versions were refused: lower algorithm.optimizer.lr" in (refusal_hint(project) or "")
    limits = project.config.service.alerts
    alerts = alerts_of(TrafficFigures(), limits, len(refused))
    assert alerts["refused_in_a_row"].startswith("versions refused in a row: 4, the limit is 3; lower")
    assert alerts_of(TrafficFigures(), limits, 3) == {}
    assert "(4 in a row)" in str(settle_start(project, 6) and last_described(project, 6))


def last_described(project: Project, number: int) -> str:
    write(project.store, number, trained(steps=8))
    return round_line(project, number).started_again or ""


def test_the_weights_that_a_restart_needs_are_kept(tmp_path) -> None:
    project = after_a_refusal(tmp_path)
    settle_start(project, 3)
    assert Path(required(project.store, 1).folder) in in_use(project)
    folder = tmp_path / "unsaved"
    folder.mkdir()
    write_sealed_json(folder / MANIFEST, {"deferred_state": True})
    publish(project.store, Policy(str(folder), 24, "digest 24", round=3))
    assert [policy.policy_version for policy in needed_to_repeat(project)] == [24, 8], "not the refused one"


class KilledAt:
    """A trainer whose process is killed after a step."""

    def __init__(self, trainer: TrainerClient, step: int) -> None:
        self._trainer, self._step = trainer, step

    def train(self, request: TrainRequest, on_step: Callable[[StepEvent], None], on_repeat: OnRepeat) -> TrainResult:
        pid = self._trainer.status()["pid"]

        def kill(event: StepEvent) -> None:
            on_step(event)
            if event.step == self._step:
                os.kill(pid, signal.SIGKILL)

        return self._trainer.train(request, kill, on_repeat)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[TrainerClient]:
    client = find_or_start_trainer(Home(tmp_path).cluster, dtype="float32", device="cpu", idle_timeout_s=240)
    yield client
    client.shutdown()


def send_traffic(project: Project, number: int, version: int) -> None:
    """Eight rated answers, sampled by ``version``."""
    traffic = traffic_store(project)
    for each in range(8):
        name = f"m{number}-{each}"
        recorded = {
            "msg_id": name, "prompt_ids": [10 + each, 11, 12], "response_ids": [20 + number, 30 + each],
            "rollout_logprobs": [-6.0, -6.0], "finish_reason": "stop", "temperature": 1.0, "top_p": 1.0, "top_k": -1,
            "tools": [], "policy_version": version, "messages": [{"role": "user", "content": "?"}],
            "response": {"role": "assistant", "content": "x"}, ENGINE: "transformers", TEMPLATE_HASH: "t",
        }  # fmt: skip
        traffic.record([NewCall(name, 0, recorded, version, 3, time.time())])
        traffic.give_feedback(NewFeedback(f"f{name}", [name], float(each % 2)))
    traffic.commit()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_trained_from_the_champion_with_equal_weights_after_a_kill(
    tmp_path: Path, tiny_model: Path, with_mlflow: Callable[[Path], None], trainer: TrainerClient, ranks: "Ranks"
) -> None:
    from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
    from rft_platform.training.loop.session import TrainingSession

    project = open_project(tmp_path, model=tiny_model, evaluation={"gate": {"min_delta": -2.0, "confident": False}})
    with_mlflow(project.home.root)
    registry = connect_registry(project)
    publish(project.store, Policy(str(tiny_model), 0, digest_weights(tiny_model), round=0))
    spec = EngineSpec(dtype="float32", device="cpu", idle_timeout_s=240)
    with find_or_start_engine(tiny_model, Home(tmp_path).cluster, spec) as engine:
        Round(project, 0).evaluate(engine, registry, force=True)
        run_round(project, 1, 0, trainer, registry)
        assert Round(project, 1).evaluate(engine, registry).promoted
        gate = project.config.evaluation.gate.model_copy(update={"min_value": 2.0})
        evaluation = project.config.evaluation.model_copy(update={"gate": gate})
        strict = project_in(project.home, project.config.model_copy(update={"evaluation": evaluation}))
        run_round(strict, 2, 2, trainer, registry)
        assert Round(strict, 2).evaluate(engine, registry).gate_passed is False
        engine.shutdown()

    collected = send_and_collect(project, 3, 2)
    assert (collected.policy_version, collected.policy_round) == (2, 1)
    with pytest.raises(TrainerError, match="ended during 'train'"):
        Round(project, 3).train(KilledAt(trainer, step=5), registry)  # type: ignore[arg-type]
    trained = Round(project, 3).train(trainer, registry)[DEFAULT_POLICY].trained
    assert trained is not None
    assert trained.policy_version == 6 and Path(trained.checkpoint).name == "global_step_6"
    assert [step.step for step in trained.step_events] == [5, 6], "numbers go on after those of the refused version"
    assert [step.metrics["staleness_max"] for step in trained.step_events] == [0.0, 1.0], "behind the parent"

    session = TrainingSession(ranks, "float32")
    session.train(train_request(project, required(project.store, 1), 2, selected(project, 2), ""), nothing, never)
    assert session.state is not None and session.state.policy_version == 4, "it holds the refused version"
    asked = train_request(project, parent_of(project.store, 3), 3, selected(project, 3), "")
    request = replace(asked, output=str(tmp_path / "straight"))
    straight = session.train(request, nothing, never)
    assert straight.weights_digest == trained.weights_digest
    continued = replace(request, **refused_parent(project), steps_before=None, output=str(tmp_path / "continued"))
    assert session.train(continued, nothing, never).weights_digest != straight.weights_digest

    trace = trace_checkpoint(trained.checkpoint, project.store, registry)
    assert [each.result.policy_version for each in trace.trainings] == [6, 2] and trace.complete
    assert trace.trainings[0].more["refused_versions"] == "4"
    (version,) = [
        found for found in registry.versions() if str(found.version) == required(project.store, 3).model_version
    ]
    assert (version.tags["refused_versions"], version.tags["round"]) == ("4", "3")


def nothing(event: StepEvent) -> None: ...


def never() -> bool:
    return False


def run_round(project: Project, number: int, version: int, trainer: TrainerClient, registry: Any) -> None:
    send_and_collect(project, number, version)
    Round(project, number).train(trainer, registry)


def send_and_collect(project: Project, number: int, version: int) -> Explored:
    send_traffic(project, number, version)
    collected = Round(project, number).collect()
    Round(project, number).judge()
    return collected


def refused_parent(project: Project) -> dict[str, Any]:
    refused = required(project.store, 2)
    return {"parent": refused.folder, "parent_version": refused.policy_version}
