"""Two projects of one name on one MLflow: the champion is known by its weights, not by its policy version."""

import shutil
from pathlib import Path

import pytest

from rft_platform.config.home import Home
from rft_platform.evaluation.results import EvaluationResult, RunScore, result_of
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, publish, write
from rft_platform.rounds.releases.promotion import against_champion


def measured(version: int, rewards: list[float]) -> EvaluationResult:
    scores = [RunScore("held-out", str(task), "sampled", reward) for task, reward in enumerate(rewards)]
    return result_of(
        scores, 1.0, round=1, policy_version=version, tasks=len(rewards), tasks_digest="t", measured_by="m",
        sampled_n=1, temperature=1.0, seed=0, failed_runs=0, completion_tokens=1, truncated_share=0.0, seconds=1.0,
    )  # fmt: skip


def train_round(project: Project, registry: ModelRegistry, number: int, digest: str, rewards: list[float]) -> Policy:
    """What a synced and measured round leaves, in the project's notes and in MLflow."""
    folder = project.checkpoints / f"global_step_{2 * number}"
    folder.mkdir(parents=True, exist_ok=True)
    version = registry.register_checkpoint(folder, 2 * number, {"weights_digest": digest})
    policy = Policy(str(folder), 2 * number, digest, number, model_version=str(version))
    publish(project.store, policy)
    write(project.store, number, RoundEvaluation(results=[measured(2 * number, rewards)]))
    return policy


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('shared')}/mlflow.db"


@pytest.mark.slow
def test_the_champion_is_looked_up_by_its_weights(project: Project, tmp_path: Path, store: str):
    twin_home = Home(tmp_path / "twin")
    twin_home.root.mkdir()
    shutil.copy(project.home.config_file, twin_home.config_file)
    twin = Project.open(twin_home)
    registry = ModelRegistry(store, None, "paper", "paper-faults")

    ours = train_round(project, registry, 1, "ours", [1.0, 0.0] * 6)
    assert against_champion(project, registry, ours, measured(2, [1.0, 0.0] * 6))[1].passed  # there is no champion yet
    registry.promote(int(ours.model_version))
    theirs = train_round(twin, registry, 1, "theirs", [1.0] * 12)  # the same policy version, other weights

    found, decision = against_champion(twin, registry, theirs, measured(2, [1.0] * 12))
    assert found is None
    assert not decision.passed
    assert "belongs to another project on this MLflow server" in decision.reason

    later = train_round(project, registry, 2, "later", [1.0] * 12)
    found, decision = against_champion(project, registry, later, measured(4, [1.0] * 12))
    assert found is not None
    assert found.policy_version == 2
    assert decision.passed
