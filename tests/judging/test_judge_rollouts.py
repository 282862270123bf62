"""Judging runs and rows: rewards, errors, advantages, speed."""

import asyncio
import math
import re
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import StorageError, UserCodeError, UserError
from rft_platform.config.schema.buffer import WeightedJudge
from rft_platform.experience.record import TRUNCATED_METRIC, RolloutRow, row_id
from rft_platform.experience.responses import encode_response
from rft_platform.experience.store import ExperienceStore
from rft_platform.judging.execution import judge_executor
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import (
    GREEDY_BASELINE,
    JUDGE_ERROR,
    WORKFLOW_REWARD,
    TasksetJudge,
    judge_rollouts,
    judge_runs,
    judge_tasksets,
)
from rft_platform.judging.types import JudgeOutput
from rft_platform.rounds.judge import run_metrics
from rft_platform.tasks.task import Task
from tests.experience.samples import step_row

TASKS = {
    f"t{i}": Task(f"t{i}", "sums", f"{i}+{i}", str(2 * i), {"question": f"{i}+{i}", "answer": str(2 * i)})
    for i in range(3)
}


def row(task: int, run: int, text: str, step: int = 0, output: Any = None, reward: float | None = None) -> RolloutRow:
    return step_row(
        f"g{task}-{run}", step, response_ids=[2], task_id=f"t{task}", taskset="sums", group_id=f"g{task}",
        response={"role": "assistant", "content": text}, run_output=output, run_reward=reward,
    )  # fmt: skip


def test_a_run_is_judged_by_its_output_or_by_its_last_answer() -> None:
    rows = [row(1, 0, "2"), row(2, 0, "4", step=1), row(2, 0, "thinking", step=0), row(2, 1, "4", output="five")]
    runs = judge_runs(rows, TASKS, build_judge("exact_match"))
    assert [(run.run_id, run.reward) for run in runs] == [("g1-0", 1.0), ("g2-0", 1.0), ("g2-1", 0.0)]
    assert runs[0].parts == {"exact_match": 1.0}


def test_means_of_metrics_count_each_run_once() -> None:
    rows = [row(1, 0, "2"), row(2, 0, "4", step=0), row(2, 0, "4", step=1), row(2, 1, "5")]
    rows[0].call.metrics, rows[2].call.metrics = {"searches": 1.0}, {"searches": 4.0, "seconds": 2.0}
    judged = judge_rollouts(rows, TASKS, build_judge("exact_match"), advantage_fn="grpo").rows
    judged[3].reward_parts = {"exact_match": math.nan}  # the judge failed on this run
    assert run_metrics(rows, judged) == {
        "workflow_metrics": {"searches": 2.5, "seconds": 2.0},
        "judge_metrics": {"exact_match": 1.0},
    }


def test_of_several_answers_to_the_last_call_the_last_has_the_output() -> None:
    picked = [row(1, 0, "first"), row(1, 0, "second", output="2", reward=0.5)]
    picked[1].row_id = row_id(picked[1].run_id, 0, 1)
    assert judge_runs(picked, TASKS, build_judge("exact_match"))[0].reward == 1.0
    assert judge_runs(picked, TASKS, None)[0].reward == 0.5


@dataclass
class Final:
    """What a workflow returns."""

    final: str


def test_a_judge_gets_objects_of_the_class_that_it_declares() -> None:
    def judge(task: dict[str, Any], response: Final) -> float:
        return float(response.final == task["answer"])

    def either(task: dict[str, Any], response: "Final | str | None") -> float:
        return float(isinstance(response, Final))

    def of_group(task: dict[str, Any], responses: list[Final]) -> list[float]:
        return [float(isinstance(response, Final)) for response in responses]

    class Object:
        async def __call__(self, task: dict[str, Any], response: Final) -> float:
            return float(isinstance(response, Final))

    rows = [row(1, 0, "", output=encode_response(Final("2")))]
    functions: list[Any] = [judge, either, of_group, partial(judge), Object()]
    for function in functions:
        assert judge_runs(rows, TASKS, build_judge(function))[0].reward == 1.0


def test_a_judge_that_declares_no_class_gets_plain_values_and_a_note_is_printed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def judge(task: dict[str, Any], response: Any) -> float:
        return float(response == {"final": task["answer"]})

    rows = [row(1, run, "", output=encode_response(Final("2"))) for run in range(3)]
    assert [run.reward for run in judge_runs(rows, TASKS, build_judge(judge))] == [1.0] * 3
    (said,) = caplog.messages
    assert "Final' are judged as plain values" in said and "annotate the judge's parameter `response`" in said


@pytest.mark.parametrize(
    "forged",
    [
        {"$class": "subprocess:Popen", "value": {"args": "touch CANARY", "shell": True}},
        {"$class": "os:system", "value": {"command": "touch CANARY"}},
        {"$class": None, "value": {"$class": "os:system", "value": {"command": "touch CANARY"}}},
        {"$class": "planted:Msg", "value": {}},
        {"$class": "pydantic:ImportString", "value": "planted"},
    ],
)
def test_a_foreign_store_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forged: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "planted.py").write_text("open('CANARY', 'w').close()\n")
    store = ExperienceStore(tmp_path / "rounds")
    store.write_rollouts(1, 0, [row(1, 0, "2", output=forged), row(1, 1, "2", output=encode_response(forged))])

    def judge(task: dict[str, Any], response: Final | dict[str, Any]) -> float:
        return 1.0

    assert [run.reward for run in judge_runs(store.rollout_rows(1), TASKS, build_judge(judge))] == [1.0, 1.0]
    time.sleep(0.2)
    assert not (tmp_path / "CANARY").exists()


def test_a_run_that_outgrew_the_context_is_not_judged() -> None:
    async def judge(task: dict[str, Any], response: Any) -> float:
        return float(response["final"] == task["answer"])

    cut = row(1, 9, "half an answer", reward=0.25)
    cut.call.metrics = {TRUNCATED_METRIC: 1.0}
    output = encode_response({"final": "2"})
    judged = judge_runs([row(1, 0, "", output=output), cut], TASKS, build_judge(judge))
    assert [(run.reward, run.error, dict(run.parts)) for run in judged] == [
        (1.0, None, {"judge": 1.0}),
        (0.25, None, {}),
    ]
    assert judge_runs([cut], TASKS, build_judge(judge))[0].reward == 0.25
    gone_on = row(1, 1, "", output=output)
    gone_on.call.metrics = {TRUNCATED_METRIC: 1.0}
    assert judge_runs([gone_on], TASKS, build_judge(judge))[0].reward == 1.0


def test_rows_get_their_runs_reward_and_advantage() -> None:
    rows = [row(1, 0, "2"), row(1, 1, "x"), row(2, 0, "4"), row(2, 1, "4")]
    spec = build_judge("exact_match")
    judged = judge_rollouts(rows, TASKS, spec, advantage_fn="grpo")
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert [r.row_id for r in judged.rows] == [r.row_id for r in rows]
    assert [r.reward for r in judged.rows] == [1.0, 0.0, 1.0, 1.0]
    assert [r.advantage for r in judged.rows] == pytest.approx([expected, -expected, 0.0, 0.0], abs=1e-12)
    assert {r.judge_version for r in judged.rows} == {spec.version}
    assert all(r.dropped_by is None for r in judged.rows) and judged.errors == []


def test_every_step_of_a_run_has_the_outcome() -> None:
    rows = [row(1, 0, "a"), row(1, 0, "b", step=1), row(1, 0, "2", step=2), row(1, 1, "c"), row(1, 1, "3", step=1)]
    judged = judge_rollouts(rows, TASKS, build_judge("exact_match"), advantage_fn="step_wise_grpo")
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert [r.advantage for r in judged.rows] == pytest.approx([expected] * 3 + [-expected] * 2)
    assert [r.reward for r in judged.rows] == [1.0, 1.0, 1.0, 0.0, 0.0]
    halved = judge_rollouts(
        rows, TASKS, build_judge("exact_match"), advantage_fn="step_wise_grpo", advantage_args={"step_norm": True}
    )
    assert halved.rows[4].advantage == pytest.approx(-expected / 2)


def test_the_weighted_sum_and_its_parts() -> None:
    spec = build_judge(
        [
            WeightedJudge(judge="exact_match"),
            WeightedJudge(judge="length", weight=0.5, args={"max_chars": 1}),
            WeightedJudge(judge=f"{__name__}:with_metrics", weight=-0.1),
        ]
    )
    run = judge_runs([row(1, 0, "2")], TASKS, spec)[0]
    assert run.reward == pytest.approx(1.0 + 0.5 - 0.2)
    with_metrics_name = f"{__name__}:with_metrics"
    assert run.parts == {"exact_match": 1.0, "length": 1.0, with_metrics_name: 2.0, f"{with_metrics_name}/words": 3.0}


def with_metrics(task: dict[str, Any], response: Any) -> JudgeOutput:
    return JudgeOutput(reward=2.0, metrics={"words": 3})


def test_a_failing_judge_drops_the_run_and_is_counted() -> None:
    def fails_on_x(task: dict[str, Any], response: Any) -> float:
        if response == "x":
            raise RuntimeError("no verdict" + "!" * 1000)
        return float(response == task["answer"])

    rows = [row(1, 0, "2"), row(1, 1, "3"), row(1, 2, "x"), row(1, 2, "x", step=1)]
    judged = judge_rollouts(rows, TASKS, build_judge(fails_on_x), advantage_fn="step_wise_grpo")
    assert [r.dropped_by for r in judged.rows] == [None, None, JUDGE_ERROR, JUDGE_ERROR]
    assert math.isnan(judged.rows[2].reward) and judged.rows[2].advantage == 0.0
    assert judged.rows[0].advantage == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))
    ((failed, error),) = [(run.run_id, run.error) for run in judged.errors]
    assert failed == "g1-2"
    assert re.fullmatch(rf"RuntimeError: no verdict!{{276}}… \({re.escape(__file__)}:\d+\)", str(error))
    assert [r.judge_error for r in judged.rows] == [None, None, error, error]


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "1 of 2"])
def test_a_reward_that_is_no_finite_number_is_an_error(bad: Any) -> None:
    def judge(task: dict[str, Any], response: Any) -> Any:
        return bad if response == "x" else 1.0

    runs = judge_runs([row(1, 0, "2"), row(1, 1, "x")], TASKS, build_judge(judge))
    assert runs[0].error is None and runs[1].error is not None and math.isnan(runs[1].reward)


def test_a_judge_that_always_fails_is_the_users_error() -> None:
    def broken(task: dict[str, Any], response: Any) -> float:
        return task["absent"]

    with pytest.raises(UserCodeError, match="failed on all 2 runs; the first: KeyError: 'absent'"):
        judge_rollouts([row(1, 0, "2"), row(1, 1, "2")], TASKS, build_judge(broken), advantage_fn="grpo")
    with pytest.raises(UserCodeError, match="failed on the only run: KeyError: 'absent'"):
        judge_runs([row(1, 0, "2")], TASKS, build_judge(broken))


def test_a_judge_that_fails_on_every_judged_run_stops_the_round_although_other_runs_have_rewards() -> None:
    def broken(task: dict[str, Any], response: Any) -> float:
        return task["absent"]

    cut = row(1, 0, "half an answer", reward=0.25)
    cut.call.metrics = {TRUNCATED_METRIC: 1.0}
    with pytest.raises(UserCodeError, match=r"the only run that it judged \(1 exceeded the context\): KeyError"):
        judge_runs([cut, row(1, 1, "2", output="2")], TASKS, build_judge(broken))


@pytest.mark.parametrize(
    ("bad", "why"),
    [("x", "the judge failed on the only run: ValueError: no verdict"), ("9", "no run has a usable reward; the first")],
)
def test_a_taskset_without_any_reward_stops_a_round_only_if_no_other_has_one(
    bad: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(task: dict[str, Any], response: Any) -> float:
        if response == "x":
            raise ValueError("no verdict")
        return float(response)

    rows = [replace(row(1, 0, bad), taskset="hard"), row(2, 0, "4"), row(2, 1, "0")]
    judges = {name: TasksetJudge(build_judge(judge), max_abs_reward=5.0) for name in ("hard", "sums")}
    found = judge_rollouts(rows, TASKS, judges, advantage_fn="grpo").rows
    assert [r.dropped_by for r in found] == [JUDGE_ERROR, None, None]
    assert [r.reward for r in found[1:]] == [4.0, 0.0]
    assert f"taskset 'hard': {why}" in caplog.text and "the runs of this taskset are excluded" in caplog.text
    rows[1:] = [row(2, 0, bad)]
    with pytest.raises(UserCodeError, match=f"^taskset 'hard': {why}.*; taskset 'sums': {why}"):
        judge_tasksets(rows, TASKS, judges)


def test_without_a_judge_the_workflows_reward_counts() -> None:
    rows = [row(1, 0, "2", reward=0.25), row(1, 1, "2", reward=0.75)]
    judged = judge_rollouts(rows, TASKS, None, advantage_fn=None)
    assert [r.reward for r in judged.rows] == [0.25, 0.75]
    assert judged.rows[0].judge_version == WORKFLOW_REWARD and judged.rows[0].advantage == 0.0
    with pytest.raises(UserError, match=r"task t1 of taskset 'sums'.*Give the taskset a judge"):
        judge_runs([row(1, 0, "2")], TASKS, None)
    both = judge_runs([row(1, 0, "2", reward=0.25)], TASKS, build_judge("exact_match"))
    assert both[0].reward == 1.0


def test_a_row_of_another_taskset_is_refused() -> None:
    with pytest.raises(StorageError, match="task t1 is not in the taskset"):
        judge_runs([row(1, 0, "2")], {}, build_judge("exact_match"))


def test_async_judges_run_together_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_executor, "CONCURRENCY", 3)
    running = most = 0

    async def judge(task: dict[str, Any], response: Any, auxiliary_models: Any, logger: Any) -> JudgeOutput:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return JudgeOutput(reward=auxiliary_models["bonus"])

    rows = [row(1, run, "2") for run in range(10)]
    runs = judge_runs(rows, TASKS, build_judge(judge), auxiliary_models={"bonus": 0.5})
    assert [run.reward for run in runs] == [0.5] * 10
    assert [run.run_id for run in runs] == [f"g1-{run}" for run in range(10)]
    assert most == 3


async def test_judging_works_inside_a_running_event_loop() -> None:
    assert judge_runs([row(1, 0, "2")], TASKS, build_judge("numeric"))[0].reward == 1.0


def test_no_rows() -> None:
    judged = judge_rollouts([], TASKS, build_judge("numeric"), advantage_fn="grpo")
    assert (judged.rows, judged.runs) == ([], [])


@pytest.mark.slow
def test_ten_thousand_rows_are_judged_in_seconds() -> None:
    rows = [row(run % 3, run, f"Let us think.\n#### {run % 7}") for run in range(10_000)]
    spec = build_judge("numeric")
    started = time.process_time()
    judged = judge_rollouts(rows, TASKS, spec, advantage_fn="grpo")
    seconds = time.process_time() - started
    assert len(judged.rows) == 10_000
    assert seconds < 10


def huge(task: dict[str, Any], response: Any) -> JudgeOutput:
    """Rewards that nobody means, for the answers ``huge`` and ``rival``."""
    reward = {"huge": 1e30, "low": -2e6}.get(response, 1e6)
    return JudgeOutput(reward, rewards={"rival": math.nextafter(1e6, 2e6)} if response == "rival" else None)


@pytest.mark.parametrize("answer", ["huge", "low", "rival"])
def test_a_reward_beyond_the_bound_is_refused(answer: str) -> None:
    runs = judge_runs([row(0, 0, "ok"), row(0, 1, answer)], TASKS, build_judge(huge))
    assert runs[0].reward == 1e6
    assert math.isnan(runs[1].reward)
    assert re.match(r"the reward is (1e\+30|-2e\+06|1e\+06), beyond 1e\+06: scale the rewards, or set", runs[1].error)
    judged = judge_rollouts([row(0, 0, "ok"), row(0, 1, answer)], TASKS, build_judge(huge), advantage_fn="grpo")
    assert [one.dropped_by for one in judged.rows] == [None, JUDGE_ERROR]


def test_the_bound_on_rewards_holds_for_workflows_too_and_can_be_lifted() -> None:
    rows = [row(0, 0, "a", reward=0.5), row(0, 1, "b", reward=-1e300)]
    assert [run.error is None for run in judge_runs(rows, TASKS, None)] == [True, False]
    assert [run.reward for run in judge_runs(rows, TASKS, None, max_abs_reward=None)] == [0.5, -1e300]
    with pytest.raises(
        UserCodeError, match=r"no run has a usable reward; the first invalid one: run g0-1 .* the reward is -1e\+300"
    ):
        judge_runs(rows[1:], TASKS, None)


def test_greedy_runs_are_a_baseline_and_are_not_trained_on() -> None:
    rows = [row(1, 0, "2"), row(1, 1, "2"), row(1, 2, "5"), row(2, 0, "5"), row(2, 1, "4")]
    for made in (rows[0], rows[3]):
        made.call.temperature = 0.0
    judged = judge_rollouts(rows, TASKS, build_judge("exact_match"), advantage_fn="remax").rows
    assert [one.advantage for one in judged] == [0.0, 0.0, -1.0, 0.0, 1.0]
    assert [one.dropped_by for one in judged] == [GREEDY_BASELINE, None, None, GREEDY_BASELINE, None]
    assert [one.masked for one in judged] == [True, False, False, True, False]
    others = judge_rollouts(rows, TASKS, build_judge("exact_match"), advantage_fn="grpo").rows
    assert not any(one.dropped_by for one in others)
