"""The regression set: a version whose scores on it fell since the start is not promoted, and nothing else changes.

And what an evaluation that is repeated keeps of an earlier decision.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.assets.checks import evaluation_results
from rft_platform.common.digests import MANIFEST, digest_weights
from rft_platform.common.files import write_json, write_sealed_json, write_text
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.inference.interface import PolicyEngine
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
from rft_platform.rounds.evaluate import evaluate_round
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, publish, read
from rft_platform.rounds.releases.promotion import against_regression_set, promote_version, roll_back
from rft_platform.rounds.releases.released import serving_policy
from rft_platform.rounds.releases.training_start import refused_in_a_row
from rft_platform.rounds.reporting.reward_audit import audit_evaluation
from rft_platform.rounds.setup.connections import connect_registry
from rft_platform.run.data_checks import regression_notices
from rft_platform.run.round_lines import champion_notes, describe_round, round_line, round_lines
from tests.support.builders import problems, write_rows

TASKS = 60
JUDGE = '''
"""Solves as many tasks of each kind as a file says, whatever the model answers."""

import json
from pathlib import Path

SOLVED = Path(__file__).with_name("solved.json")


def score(task, response):
    return float(int(task["number"]) < json.loads(SOLVED.read_text())[task["kind"]])
'''


def config_of(folder: Path, model: Path, **evaluation: Any) -> dict[str, Any]:
    """Two held-out tasksets of 60 tasks; ``general`` is the regression set."""
    tasksets = []
    for kind in ("held-out", "general"):
        rows = [{"question": f"{kind} {n}", "answer": "1", "kind": kind, "number": n} for n in range(TASKS)]
        path = write_rows(folder / f"{kind}.jsonl", rows)
        tasksets.append({"path": path, "name": kind, "judge": f"{folder}/table_judge.py:score"})
    regression = {"taskset": "general", "tolerance": 0.1}
    return {
        "project": "shop", "name": "helper",
        "model": {"model_path": str(model), "max_model_len": 64, "max_response_tokens": 1},
        "buffer": {
            "total_steps": 4, "batch_size": 1,
            "explorer_input": {"taskset": tasksets[0], "eval_tasksets": tasksets},
        },
        "evaluation": {"greedy": False, "regression": regression, **evaluation},
    }  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, with_mlflow: Callable[[Path], None]) -> Project:
    (tmp_path / "table_judge.py").write_text(JUDGE)
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump(config_of(tmp_path, tiny_model)))
    with_mlflow(home.root)
    return Project.open(home)


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Iterator[PolicyEngine]:
    """An engine whose weights the test changes."""
    with find_or_start_engine(tiny_model, Home(tmp_path / "engine").cluster, EngineSpec(device="cpu")) as client:
        yield client
        client.shutdown()


@pytest.fixture
def evaluated(project: Project, engine: PolicyEngine, tmp_path: Path) -> Callable[..., RoundEvaluation]:
    """Evaluate new weights as a round; the judge solves so many tasks of both kinds."""
    registry = connect_registry(project)

    def evaluate(number: int, held_out: int, general: int, version: int | None = None) -> RoundEvaluation:
        write_json(tmp_path / "solved.json", {"held-out": held_out, "general": general})
        folder = Path(str(project.config.model.model_path))
        if number:
            folder = project.checkpoints / f"global_step_{version or number}"
            if not folder.exists():
                _nudged(Path(str(project.config.model.model_path)), folder, number)
        digest = digest_weights(folder)
        model = registry.register_checkpoint(folder, number, {"weights_digest": digest}) if number else None
        policy = Policy(str(folder), version or number, digest, number, model_version=model and str(model))
        publish(project.store, policy)
        return evaluate_round(project, engine, registry, number)

    return evaluate


def _nudged(base: Path, folder: Path, number: int) -> None:
    """A checkpoint: a copy of a model with slightly different weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += number / 64
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_sealed_json(folder / MANIFEST, {"files": {}})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_only_a_worse_regression_set_blocks_a_promotion(
    project: Project, evaluated: Callable[..., RoundEvaluation]
) -> None:
    def champion() -> int | None:
        found = connect_registry(project).champion()
        return None if found is None else int(found.tags["policy_version"])

    start = evaluated(0, held_out=10, general=40)
    assert start.regression is None and len(start.results) == 2
    first = evaluated(1, held_out=30, general=39)
    assert first.promoted and first.regression is not None and first.regression.decision.passed
    assert champion() == 1, "a loss within the tolerance blocks nothing"

    fallen = evaluated(2, held_out=50, general=20)
    assert not fallen.promoted and fallen.gate_passed is False and champion() == 1
    assert "against the champion's 0.5000" in fallen.gate and "; but regression set general: " in fallen.gate
    assert "sampled_pass 0.3333 against the start's 0.6667" in fallen.gate
    said = "regression set general: -33.3 points, perhaps more than 10.0 points worse than v0"
    assert fallen.gate_summary == said
    assert fallen.metrics["regression/general/sampled_pass"] == pytest.approx(-1 / 3)

    lines = round_lines(project)
    assert describe_round(lines[-1]).endswith(f"not promoted: {said}")
    notes = champion_notes(project, lines)
    assert notes[0] == f"v2 was not promoted: {said}"
    assert notes[-1].endswith(
        "and the 95 % interval of the difference from the start in sampled_pass on the regression set general lies "
        "above -10.0 points"
    )
    assert said.partition(": ")[2] in (project.store.round_folder(2) / "report.md").read_text()
    recorded = read(project.store, 2).evaluated
    assert recorded is not None
    gate, regression, _ = evaluation_results(
        fallen.gate_passed, fallen.gate, recorded.regression, audit_evaluation(project, 2)
    )
    assert (gate.passed, regression.passed, regression.check_name) == (False, False, "no_regression")
    assert regression.metadata["regression/general/sampled_pass"].value == pytest.approx(-0.3333)

    again = evaluated(3, held_out=50, general=40)
    assert again.promoted and champion() == 3, "the same gain without the loss"
    worse = evaluated(4, held_out=40, general=60)
    assert not worse.promoted and worse.gate_passed is False
    assert worse.regression is not None and worse.regression.decision.passed, "the gate alone refuses this one"
    assert "regression set" not in worse.gate
    assert round_line(project, 4).not_promoted == "-16.7 points, not better than v3"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_champion_stays_champion_when_it_is_measured_again(
    project: Project, evaluated: Callable[..., RoundEvaluation]
) -> None:
    evaluated(0, held_out=10, general=40)
    assert evaluated(1, held_out=30, general=40).promoted
    no_op = evaluated(2, held_out=30, general=20, version=1)  # a round that trained nothing
    assert no_op.promoted and no_op.regression is not None and not no_op.regression.decision.passed

    changed = project.config.evaluation.regression
    assert changed is not None
    other = replace(no_op.results[1], measured_by="another judge")
    found = against_regression_set(project, Policy("f", 9, "d", 3), [no_op.results[0], other])
    assert found is not None and not found.decision.passed and found.figures() == {}
    assert found.decision.reason == (
        "regression set general: the start (policy version 0) was measured by another judge, workflow or sampling (or "
        "another version of the platform): evaluate it again (`rft eval --all`)"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_repeated_evaluation_keeps_refusals_roll_backs_and_decisions_of_people(
    project: Project, engine: PolicyEngine, evaluated: Callable[..., RoundEvaluation]
) -> None:
    registry = connect_registry(project)

    def again(number: int, **options: bool) -> RoundEvaluation:
        return evaluate_round(project, engine, registry, number, force=True, **options)

    evaluated(0, held_out=10, general=40)
    assert evaluated(1, held_out=30, general=40).promoted
    refused = evaluated(2, held_out=30, general=40)
    kept = "; nothing is promoted by this evaluation; the decision of the earlier evaluation stays"
    assert again(2, promote=False).gate.endswith(kept)
    assert list(refused_in_a_row(project, 2)) == [2] and round_line(project, 2).not_promoted == refused.gate_summary

    assert evaluated(3, held_out=50, general=40).promoted
    roll_back(project, registry)
    for promote in (False, True, True):
        found = again(3, promote=promote)
        assert not found.promoted and found.rolled_back_at is not None
    assert found.gate_passed is False and "these weights were rolled back at" in found.gate

    promote_version(project, registry, 3, "by hand")
    for promote in (False, True):
        found = again(3, promote=promote)
        assert (found.promoted, found.promoted_because, found.rolled_back_at) == (True, "by hand", None)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("solved", [30, 59], ids=["the same scores", "better than its successor"])
def test_a_version_older_than_the_champion_keeps_its_decision_when_it_is_measured_again(
    project: Project, engine: PolicyEngine, evaluated: Callable[..., RoundEvaluation], tmp_path: Path, solved: int
) -> None:
    registry = connect_registry(project)
    evaluated(0, held_out=10, general=40)
    first, second = (evaluated(number, held_out=held_out, general=40) for number, held_out in ((1, 30), (2, 50)))
    assert first.promoted and second.promoted
    run = registry.training_run(project.config.name)

    def recorded() -> tuple[str, list[tuple[int, float]]]:
        """The decision that the version has in MLflow, and the rounds' differences from the champion."""
        history = run.client.get_metric_history(run.run_id, "eval/vs_champion/sampled_pass")
        (version,) = (each for each in registry.versions() if each.version == 1)
        return version.tags["gate"], [(point.step, point.value) for point in history]

    before = recorded()
    assert before[0] == first.gate and [step for step, _ in before[1]] == [2]
    write_json(tmp_path / "solved.json", {"held-out": solved, "general": 40})
    again = evaluate_round(project, engine, registry, 1, force=True)
    assert again.metrics["sampled_pass"] == pytest.approx(solved / TASKS)
    assert (again.promoted, again.gate_passed, again.gate_summary) == (True, True, first.gate)
    said = "; nothing is promoted by this evaluation, because model version 2 is newer; the decision of the earlier "
    assert again.gate.endswith(f"{said}evaluation stays") and recorded() == before
    champion = registry.champion()
    assert champion is not None and champion.version == 2
    assert roll_back(project, registry).version == 1
    serving = serving_policy(project)
    assert serving is not None and serving.policy_version == 1, "the records name the same champion"


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ({"regression": {"taskset": "held-out"}}, "other than the first"),
        ({"regression": {"taskset": "nothing"}}, "these are general"),
        ({"regression": {"taskset": "general", "metric": "greedy_pass"}}, "set evaluation.greedy to true"),
        ({"regression": {"taskset": "general"}}, None),
    ],
)
def test_requirements_of_a_regression_set(tmp_path: Path, evaluation: dict[str, Any], said: str | None) -> None:
    found = [
        line for line in problems(build_config(config_of(tmp_path, tmp_path, **evaluation))) if "regression" in line
    ]
    assert [said in line for line in found] == ([True] if said else [])


def test_too_few_tasks_are_noticed(tmp_path: Path) -> None:
    def noticed(**settings: Any) -> list[str]:
        regression = {"taskset": "general", **settings}
        config = build_config(config_of(tmp_path, tmp_path, regression=regression))
        return [finding.text for finding in regression_notices(Project(Home(tmp_path), config))]

    (warning,) = noticed(tolerance=0.03)
    assert "with the 60 tasks of general the interval of an unchanged policy reaches -0.032" in warning
    assert noticed(tolerance=0.04) == noticed(tolerance=0.03, confident=False) == []


def test_the_start_must_be_evaluated(tmp_path: Path) -> None:
    config = config_of(tmp_path, tmp_path) | {"explorer": {"eval_on_startup": False}}
    assert any(
        "set explorer.eval_on_startup to true" in line
        for line in problems(build_config(json.loads(json.dumps(config))))
    )
