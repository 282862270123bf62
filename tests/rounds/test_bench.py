"""All policies on the held-out tasks: which are still to be measured, what the plan launches, and the table."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rft_platform.common.errors import UserError
from rft_platform.common.files import write_json, write_text
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.findings import refuse
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.buffer import Taskset
from rft_platform.evaluation.results import EvaluationResult, RunScore, result_of, tasks_digest
from rft_platform.model_registry.models import DIGEST_TAG, PREVIOUS_TAG, RegisteredModel
from rft_platform.rollout.class_style import ClassWorkflow, Workflow
from rft_platform.rounds import evaluate
from rft_platform.rounds.evaluate import evaluate_round
from rft_platform.rounds.planning.plan import plan_next
from rft_platform.rounds.planning.project_state import Failures, Launches, observe
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, publish, required, write
from rft_platform.rounds.releases.promotion import against_champion, compared, decide, promoted_last, promoted_later
from rft_platform.rounds.reporting.bench import bench_lines, unmeasured, write_bench
from rft_platform.rounds.setup.taskset_binding import measured_by, workflow_of


class Registry:
    """What the gate asks of a registry."""

    def __init__(self, champion: RegisteredModel | None = None, *earlier: RegisteredModel) -> None:
        self._champion, self._earlier = champion, earlier

    def versions(self) -> list[RegisteredModel]:
        """All that were given."""
        return [*self._earlier, *([self._champion] if self._champion else [])]

    def champion(self) -> RegisteredModel | None:
        """The one given."""
        return self._champion


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """The start and four rounds, of which the second was a no-op and the fourth lost its weights."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    settings = {
        "mode": "bench",
        "project": "p",
        "name": "n",
        "model": {"model_path": "base"},
        "buffer": {"total_steps": 4, "eval_tasksets": [{"path": str(held_out), "name": "held-out"}]},
        "evaluation": {"greedy": False},
    }
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump(settings))
    opened = Project.open(home)
    for number in range(5):
        folder = opened.checkpoints / f"global_step_{1 if number == 2 else number}"
        folder.mkdir(parents=True, exist_ok=True)
        if number != 4:
            (folder / "model.safetensors").write_bytes(b"weights")
        publish(opened.store, Policy(str(folder), number, f"w{1 if number == 2 else number}", round=number))
    write_json(opened.checkpoints / "global_step_4" / "thinned.json", {})
    return opened


def measured(project: Project, number: int, passed: int) -> EvaluationResult:
    """A result in which the first ``passed`` of the 8 tasks are solved."""
    tasks = [task.task_id for task in project.eval_tasks[0][1].tasks]
    scores = [RunScore("held-out", task, "sampled", float(i < passed)) for i, task in enumerate(tasks)]
    return result_of(
        scores, 1.0, round=number, policy_version=number, tasks=8, tasks_digest=tasks_digest(tasks), sampled_n=1,
        temperature=1.0, seed=0, failed_runs=0, completion_tokens=1, truncated_share=0.0, seconds=1.0,
        measured_by=measured_by(project, project.eval_tasks[0][0]),
    )  # fmt: skip


def note(project: Project, result: EvaluationResult, promoted: bool = False) -> None:
    differences = compared(project, required(project.store, result.round), result, None)
    write(project.store, result.round, RoundEvaluation(promoted=promoted, results=[result], compared=differences))


def test_each_policy_is_measured_once_in_order(project: Project) -> None:
    def launched(launches: Launches = Launches()) -> list[str | None]:
        return [action.partition for action in plan_next(observe(project, launches)).actions]

    assert [action.kind for action in plan_next(observe(project, Launches())).actions] == ["warm_start"]
    note(project, measured(project, 0, 2))
    assert unmeasured(project) == [1, 3]  # 2 has the weights of 1, those of 4 are gone
    assert launched() == ["r0001"]
    failed = Launches(failures={("evaluate", 1): Failures(4, "the engine is gone")})
    assert "r0001 evaluate failed 4 times, at last with: the engine is gone" in str(plan_next(observe(project, failed)))
    assert plan_next(observe(project, Launches(running=frozenset({("evaluate", 1)})))).waiting == (
        "r0001 evaluate is running",
    )
    note(project, measured(project, 2, 4))
    assert launched() == ["r0003"]
    note(project, measured(project, 3, 4))
    assert plan_next(observe(project, Launches())).finished


def test_the_start_is_measured_as_a_partition_too(project: Project) -> None:
    write(project.store, 0, RoundEvaluation(gate="not due", promoted=False, metrics={}))
    (action,) = plan_next(observe(project, Launches())).actions
    assert (action.kind, action.partition, action.run_key) == ("evaluate", "r0000", "evaluate:r0000:0")


def test_an_evaluation_needs_no_explored_tasks(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "deploy", lambda engine, policy: None)
    monkeypatch.setattr(evaluate, "_evaluate", lambda *_: RoundEvaluation("passed"))
    engine: Any = SimpleNamespace(status=lambda: SimpleNamespace(cpu_seconds=0.0))
    buffer = project.config.buffer.model_copy(update={"total_steps": None})
    opened = Project(project.home, project.config.model_copy(update={"buffer": buffer}))
    assert evaluate_round(opened, engine, Registry(), 1, force=True).gate == "passed"  # type: ignore[arg-type]


def test_other_tasks_make_all_be_measured_again(project: Project, tmp_path: Path) -> None:
    for number in (0, 1, 3):
        note(project, measured(project, number, 3))
    assert unmeasured(project) == []
    with (tmp_path / "held_out.jsonl").open("a") as stream:
        stream.write(json.dumps({"question": "9+9=", "answer": "18"}) + "\n")
    assert unmeasured(Project.open(project.home)) == [0, 1, 3]


def reconfigured(project: Project, **changes: Any) -> Project:
    """The project after its held-out taskset was changed."""
    settings = yaml.safe_load(project.home.config_file.read_text())
    settings["buffer"]["eval_tasksets"][0].update(changes)
    write_text(project.home.config_file, yaml.safe_dump(settings))
    return Project.open(project.home)


@pytest.mark.parametrize(
    "changes",
    [
        {"judge": "contains"},
        {"judge_args": {"ignore_case": True}},
        {"workflow": "calculator"},
        {"workflow_args": {"turns": 3}},
        {"rollout_args": {"temperature": 0.2}},
        {"format": {"system_prompt": "Count."}},
    ],
)
def test_policies_measured_in_another_way_are_measured_again(project: Project, changes: dict[str, Any]) -> None:
    for number in (0, 1, 3):
        note(project, measured(project, number, 2 * number + 1))
    assert unmeasured(project) == []
    changed = reconfigured(project, **changes)
    assert unmeasured(changed) == [0, 1, 3]
    result = measured(changed, 3, 8)
    assert compared(changed, required(changed.store, 3), result, None) == []
    _, decision = against_champion(changed, Registry(), required(changed.store, 3), result)  # type: ignore[arg-type]
    assert not decision.passed
    assert "start (policy version 0) was measured by another judge, workflow or sampling" in decision.reason
    assert decision.reason.endswith("evaluate it again (`rft eval --all`)")
    assert unmeasured(reconfigured(changed, judge_timeout_s=5.0, rollout_args={}, **_BACK)) == []


_BACK: dict[str, Any] = {
    "judge": "exact_match", "judge_args": {}, "workflow": "single_turn", "workflow_args": {}, "format": {},
}  # fmt: skip


def test_a_policy_is_not_compared_with_itself(project: Project) -> None:
    """Round 2 trained nothing: its weights are those of round 1."""
    note(project, measured(project, 0, 2))
    note(project, measured(project, 1, 6))
    again = measured(project, 2, 6)
    found = compared(project, required(project.store, 2), again, measured(project, 1, 6))
    assert {each.against for each in found} == {"start"}
    start = compared(project, required(project.store, 0), measured(project, 0, 2), measured(project, 1, 6))
    assert {each.against for each in start} == {"champion"}


def test_the_table_has_a_score_or_a_reason_for_every_policy(project: Project) -> None:
    note(project, measured(project, 0, 2))
    note(project, measured(project, 1, 6), promoted=True)
    page = write_bench(project).read_text()
    assert "| round 0 (v0) | held-out | 25.0% | – | 0.2500 |" in page
    assert "| round 1 (v1), promoted | held-out | 75.0% | – | 0.7500 | +50.0 points (" in page
    assert "| round 2 (v2) | the weights of round 1 |" in page
    assert "| round 3 (v3) | not measured yet |" in page
    assert "| round 4 (v4) | its weights were removed |" in page
    lines = json.loads((project.home.root / "bench.json").read_text())
    assert lines[1]["metrics"][0]["eval/held-out/reward/mean@1"] == 0.75
    assert [each["against"] for each in lines[1]["comparisons"]][:2] == ["previous", "previous"]
    assert [line.round for line in bench_lines(project)] == [0, 1, 2, 3, 4]
    assert promoted_last(project) == measured(project, 1, 6)


def test_the_start_is_to_be_reached_while_there_is_no_champion(project: Project) -> None:
    note(project, measured(project, 0, 4))
    policy = required(project.store, 1)

    def decided(passed: int) -> tuple[bool, str]:
        champion, decision = against_champion(project, Registry(), policy, measured(project, 1, passed))  # type: ignore[arg-type]
        assert champion is None
        return decision.passed, decision.reason

    assert decided(3) == (
        False, "sampled_pass 0.3750 against the start's 0.5000 (policy version 0): needs 0.5000",
    )  # fmt: skip
    assert decided(4)[0], "a tie is enough for the first champion"
    gate = project.config.evaluation.gate.model_copy(update={"confident": True})
    evaluation = project.config.evaluation.model_copy(update={"gate": gate})
    strict = replace(project, config=project.config.model_copy(update={"evaluation": evaluation}))
    for count, passed in ((4, False), (5, False), (8, True)):  # one task of 8 is no evidence
        result = measured(project, 1, count)
        assert against_champion(strict, Registry(), policy, result)[1].passed is passed  # type: ignore[arg-type]
    start = required(project.store, 0)
    found, decision = against_champion(project, Registry(), start, measured(project, 0, 4))  # type: ignore[arg-type]
    assert found is None
    assert decision.passed


def test_an_evaluation_that_was_killed_after_its_promotion_is_decided_again(project: Project) -> None:
    """The policy is the champion already, but has no note: it is compared with its predecessor, not with itself."""
    note(project, measured(project, 1, 1), promoted=True)
    before = RegisteredModel("p-n", 1, Path("m"), {DIGEST_TAG: "w1"})
    champion = RegisteredModel("p-n", 2, Path("m"), {DIGEST_TAG: "w3", PREVIOUS_TAG: "1"})
    registry: Any = Registry(champion, before)
    policy, result = replace(required(project.store, 3), model_version="2"), measured(project, 3, 8)
    beaten, decision = against_champion(project, registry, policy, result)
    assert beaten is not None
    assert beaten.round == 1
    assert decision.passed
    assert decision.reason.startswith("sampled_pass 1.0000 against the champion's 0.1250")
    no_op = replace(policy, round=4, model_version="2")
    publish(project.store, no_op)  # a round that trained nothing publishes the weights of the champion again
    _, unchanged = against_champion(project, registry, no_op, replace(result, round=4))
    assert unchanged.reason == "these weights are the champion already (version 2)"
    note(project, result, promoted=True)
    _, later = against_champion(project, registry, policy, result)
    assert later.reason == "these weights are the champion already (version 2)"


def test_weights_that_were_rolled_back_are_promoted_by_a_person_only(project: Project) -> None:
    note(project, measured(project, 1, 1), promoted=True)
    registry: Any = Registry(RegisteredModel("p-n", 1, Path("m"), {DIGEST_TAG: "w1"}))
    policy, result = required(project.store, 3), measured(project, 3, 8)
    write(project.store, 3, RoundEvaluation(rolled_back_at="2026-05-04T03:02:01Z", results=[result]))
    no_op = replace(policy, round=4)
    publish(project.store, no_op)
    for each in (policy, no_op):
        decision = decide(project, registry, each, [result])[1]
        assert not decision.passed
        assert "these weights were rolled back at 2026-05-04T03:02:01Z; `rft models promote 3`" in decision.reason
    write(project.store, 3, RoundEvaluation(promoted=True, promoted_because="by hand", results=[result]))
    assert decide(project, registry, policy, [result])[1].passed


def test_no_version_is_promoted_after_a_newer_one(project: Project) -> None:
    policies = [replace(required(project.store, number), model_version=str(number)) for number in (1, 3)]
    registry: Any = Registry(RegisteredModel("p-n", 1, Path("m"), {DIGEST_TAG: "w1"}))
    assert [promoted_later(project, registry, policy) for policy in policies] == [None, None]
    note(project, measured(project, 2, 8), promoted=True)  # a round that trained nothing: the weights of round 1
    assert promoted_later(project, registry, policies[0]) is None
    note(project, measured(project, 3, 8), promoted=True)  # the champion's alias was moved back by hand
    assert [promoted_later(project, registry, policy) for policy in policies] == ["policy version 3", None]
    newer: Any = Registry(RegisteredModel("p-n", 3, Path("m"), {DIGEST_TAG: "w3"}))
    assert promoted_later(project, newer, policies[0]) == "model version 3"


def test_a_policy_is_compared_with_the_one_before_the_champion_and_the_start(project: Project) -> None:
    for number, passed in ((0, 1), (1, 8), (2, 5)):
        note(project, measured(project, number, passed))
    found = compared(project, required(project.store, 3), measured(project, 3, 6), measured(project, 1, 8))
    passes = {each.against: each.difference for each in found if each.metric == "sampled_pass"}
    assert passes == {"previous": 0.125, "champion": -0.25, "start": 0.625}


def test_arguments_of_the_judge_and_of_a_rewarding_workflow_are_two_keys(project: Project) -> None:
    settings = project.config.model_dump(mode="json", exclude_unset=True)
    taskset = {"path": "tasks.jsonl", "workflow": f"{Path(__file__)}:Rewarding", "judge_args": {"ignore_case": True}}
    opened = Project(project.home, build_config({**settings, "explorer": {}}))
    workflow = workflow_of(opened, Taskset(**taskset, reward_fn_args={"scale": 2.0}))  # type: ignore[arg-type]
    assert isinstance(workflow, ClassWorkflow)
    assert workflow.reward_fn_args == {"scale": 2.0}
    orphaned = build_config({"buffer": {"explorer_input": {"taskset": {**taskset, "judge": None}}}})
    with pytest.raises(UserError, match=r"taskset\.judge_args: there is no judge to pass them to; .* reward_fn_args"):
        refuse(settings_findings(resolve(orphaned), Machine(2, 0)))


class Rewarding(Workflow):
    """A workflow that a configuration names."""
