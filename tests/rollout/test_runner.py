"""Runs of agents over HTTP: isolation, failures, group policies, determinism."""

import asyncio
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rft_platform.common.errors import EngineError, UserCodeError
from rft_platform.common.fault_classification import user_traceback
from rft_platform.experience.record import ModelCall
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runner.report import RolloutBatch, RolloutReport
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.runs.run import Run
from rft_platform.rollout.workflow import Workflow, WorkflowOutput
from rft_platform.tasks.task import Task

from .fake_engine import FakeEngine
from .samples import Custom, ask_blocking, ask_once, roll_out, tasks


def explore(engine: FakeEngine, workflow: Workflow, count: int = 3, **options: Any) -> RolloutBatch:
    settings = {"round": 1, "batch": 0, "repeat_times": 2, "sampling": SamplingParams(max_tokens=64), **options}
    return roll_out(engine, tasks(count), workflow, **settings)


@pytest.mark.parametrize("workflow", [ask_once, ask_blocking])
def test_every_run_becomes_its_rows(engine: FakeEngine, workflow: Workflow) -> None:
    batch = explore(engine, workflow)
    assert [row.task_id for row in batch.rows] == ["task-0", "task-0", "task-1", "task-1", "task-2", "task-2"]
    for row in batch.rows:
        assert row.messages[0]["content"] == f"question {row.task_id[5:]}"
        assert row.run_output == row.response["content"]
        assert row.run_reward is None
    assert len({tuple(row.response_ids) for row in batch.rows}) == 6  # each run has its own seed


def test_steps_output_and_reward_are_on_the_last_row(engine: FakeEngine) -> None:
    batch = explore(engine, Custom(turns=3), count=1, repeat_times=1)
    assert [row.step for row in batch.rows] == [0, 1, 2]
    assert [row.run_output for row in batch.rows] == [None, None, {"turns": 3}]
    assert [row.run_reward for row in batch.rows] == [None, None, 0.5]
    assert [row.metrics for row in batch.rows] == [{}, {}, {"turns": 3.0}]


def test_a_rerun_gives_the_same_rows(engine: FakeEngine) -> None:
    first, again = explore(engine, ask_once), explore(engine, ask_once)
    assert [(r.row_id, r.response_ids) for r in first.rows] == [(r.row_id, r.response_ids) for r in again.rows]


def test_each_attempt_has_a_seed_of_its_own_and_a_repeated_batch_has_the_same_seeds(engine: FakeEngine) -> None:
    """A retry with the seed of the failed attempt would fail in the same way."""

    def seeds() -> dict[str, list[int]]:
        engine.chat_requests.clear()
        workflow = Flaky({"question 1": ("raise", 2)})
        batch = explore(engine, workflow, count=2, repeat_times=1, max_retries=2, concurrency=1)
        assert (batch.report.rows, batch.report.retried) == (2, 2)
        found: dict[str, list[int]] = {}
        for body in engine.chat_requests:
            found.setdefault(body["messages"][0]["content"], []).append(body["seed"])
        return found

    first = seeds()
    assert [len(set(own)) for own in first.values()] == [1, 3]
    assert seeds() == first
    places = itertools.product((1, 2), (0, 1), (0, 1), (0, 1))
    runs = [Run(number, batch, index, repeat, tasks(1)[0]) for number, batch, index, repeat in places]
    assert len({run.seed(base, attempt) for run in runs for base in (0, 1) for attempt in (0, 1)}) == 16 * 4


def test_runs_and_groups_of_all_batches_have_different_ids(engine: FakeEngine) -> None:
    places = [(round_number, batch) for round_number in (1, 2) for batch in (0, 1)]
    batches = [explore(engine, ask_once, count=2, round=number, batch=batch) for number, batch in places]
    rows = [row for batch in batches for row in batch.rows]
    groups = {row.group_id: row.task_id for row in rows}
    assert len(groups) == 4 * 2, "one for each task of each batch"
    assert len({row.run_id for row in rows}) == len({row.row_id for row in rows}) == len(rows) == 4 * 2 * 2
    assert all(groups[row.group_id] == row.task_id and row.run_id.startswith(f"{row.group_id}-") for row in rows)


def test_class_style_workflow_returns_its_experiences(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> Any:
        await model.chat([{"role": "user", "content": "warm-up, not to be trained on"}])
        model.extract_experience_from_history()
        await model.chat([{"role": "user", "content": task["question"]}])
        experiences = model.extract_experience_from_history(clear_history=True)
        assert model.extract_experience_from_history() == []
        for experience in experiences:
            experience.reward = 0.25
        return experiences

    (row,) = explore(engine, workflow, count=1, repeat_times=1).rows
    assert (row.step, row.run_reward, row.messages[0]["content"]) == (0, 0.25, "question 0")


def test_steps_record_the_state_of_the_environment_that_they_answered(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        question = [{"role": "user", "content": task["question"]}]
        await model.chat(question)
        for state in ({"door": "shut", "at": [0, 1]}, {"at": [0, 1], "door": "shut"}, "open", None):
            model.set_env_state(state)
            await model.chat(question)
        return WorkflowOutput(reward=1.0)

    rows = explore(engine, workflow, count=1, repeat_times=2).rows
    hashes = [row.env_state_hash for row in rows[:5]]
    assert [hashes[i] is None for i in range(5)] == [True, False, False, False, True]
    assert hashes[1] == hashes[2] != hashes[3]
    assert [row.env_state_hash for row in rows[5:]] == hashes  # equal states of another run


def test_a_state_that_cannot_be_compared_is_the_users_error(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        model.set_env_state(object())
        return WorkflowOutput(reward=1.0)

    with pytest.raises(UserCodeError, match="give text, bytes or a JSON value"):
        explore(engine, workflow, max_retries=0)


@dataclass
class Flaky:
    """Fails by plan: ``plan[question]`` says in what way, and how many attempts fail before one succeeds."""

    plan: dict[str, tuple[str, int]]

    def __post_init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        self.most = self.now = 0

    async def __call__(self, task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            question = task["question"]
            task["question"] = "changed by the run"
            message = await model.chat([{"role": "user", "content": question}])
            self.attempts[question] += 1
            kind, failures = self.plan.get(question, ("", 0))
            if self.attempts[question] <= failures:
                if kind == "time-out":
                    async with asyncio.timeout(0):
                        await asyncio.Event().wait()
                if kind == "exit":
                    raise SystemExit(1)
                raise ConnectionResetError(f"tool broke in {kind}")
            return WorkflowOutput(response=[question, message["content"]])
        finally:
            self.now -= 1


@pytest.mark.slow
def test_two_hundred_runs_with_injected_failures(engine: FakeEngine) -> None:
    chance = random.Random(0)
    kinds, counts = ["time-out", "raise", "exit"], [0, 0, 1, 2, 99]
    plan = {f"question {n}": (chance.choice(kinds), chance.choice(counts)) for n in range(200)}
    workflow = Flaky(plan)
    batch = explore(engine, workflow, 200, repeat_times=1, concurrency=100, max_retries=1)
    report = batch.report
    lost = {q for q, (_, failures) in plan.items() if failures == 99}  # two passes of two attempts mend the others
    failed = {kind: sum(min(n, 4) for k, n in plan.values() if k == kind) for kind in kinds}
    assert (report.runs, report.failed, report.dropped_groups) == (200, len(lost), len(lost))
    assert report.rows == len(batch.rows) == 200 - len(lost)
    assert report.retried == sum(failed.values()) - len(lost)  # a lost run's last attempt is followed by no other
    assert report.errors == {
        "TimeoutError: ": failed["time-out"],
        "ConnectionResetError: tool broke in raise": failed["raise"],
        "SystemExit: 1": failed["exit"],
    }
    assert 1 < workflow.most <= 100
    for row in batch.rows:  # no cross-talk: a run's row is its own call and its own output
        question, answer = row.run_output
        assert question == row.messages[0]["content"] == f"question {row.task_id[5:]}"
        assert answer == row.response["content"]


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [False, True])
def test_a_run_that_hangs_is_given_up(engine: FakeEngine, blocking: bool) -> None:
    freed = threading.Event()

    async def hangs(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        if task["question"] == "question 1":
            await asyncio.Event().wait()
        return await ask_once(task, model)

    def blocks(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        if task["question"] == "question 1":
            freed.wait()
        return ask_blocking(task, model)

    workflow = blocks if blocking else hangs
    batch = explore(engine, workflow, repeat_times=1, timeout_s=2.0, max_retries=0, group_policy="drop")
    freed.set()
    assert (batch.report.rows, batch.report.failed) == (2, 1)
    assert batch.report.errors == {"TimeoutError: no result within 2 s": 1}


@pytest.mark.parametrize(
    ("policy", "attempts", "rows", "dropped"), [("complete", 4, 4, 1), ("drop", 2, 4, 1), ("partial", 2, 5, 0)]
)
def test_group_policies(engine: FakeEngine, policy: Any, attempts: int, rows: int, dropped: int) -> None:
    tried: Counter[str] = Counter()

    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        tried[task["question"]] += 1
        number = tried[task["question"]]
        message = await model.chat([{"role": "user", "content": task["question"]}])
        if task["question"] == "question 1" and number > 1:
            raise RuntimeError("the second run never works")
        return WorkflowOutput(response=message["content"])

    batch = explore(engine, workflow, concurrency=1, max_retries=1, group_policy=policy)
    assert tried["question 1"] == 1 + attempts
    assert (len(batch.rows), batch.report.failed, batch.report.dropped_groups) == (rows, 1, dropped)
    assert all(row.run_reward is None for row in batch.rows)  # a failed run is never reward 0


def test_second_pass_completes_a_group(engine: FakeEngine) -> None:
    workflow = Flaky({"question 1": ("raise", 3)})
    batch = explore(engine, workflow, repeat_times=1, max_retries=1, group_policy="complete")
    assert (batch.report.rows, batch.report.failed, batch.report.retried) == (3, 0, 3)
    assert explore(engine, Flaky(workflow.plan), repeat_times=1, max_retries=1, group_policy="drop").report.rows == 2


def test_all_failing_is_the_users_error(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        await model.chat([{"role": "user", "content": "hello"}])
        raise KeyError("anwser")

    with pytest.raises(UserCodeError, match="all 6 runs failed, the last with KeyError") as caught:
        explore(engine, workflow, max_retries=0)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "again" not in str(caught.value), "the driver says how to start it again"
    with pytest.raises(UserCodeError, match=r"batch 0: the only run failed with KeyError.*; correct the workflow$"):
        explore(engine, workflow, 1, repeat_times=1, max_retries=0)


def test_time_outs_name_the_place_and_the_setting_that_allows_more(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        await model.chat([{"role": "user", "content": "hello"}])
        await asyncio.sleep(60)
        return WorkflowOutput(reward=1.0)

    with pytest.raises(UserCodeError, match=r"within 0\.5 s \(.*test_runner\.py:\d+\); .*\.max_timeout") as caught:
        explore(engine, workflow, 1, repeat_times=1, timeout_s=0.5, max_retries=0, group_policy="drop")
    assert caught.value.__cause__ is not None
    shown = user_traceback(caught.value.__cause__)
    assert shown is not None and "asyncio.sleep(60)" in shown and shown.endswith("TimeoutError: no result within 0.5 s")
    assert "agent_runner.py" not in shown


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda: WorkflowOutput(reward=float("nan")), "finite number"),
        (lambda: WorkflowOutput(response=threading.Lock()), "cannot be stored"),
        (lambda: "just text", "returned str, expected WorkflowOutput"),
        (lambda: WorkflowOutput(metrics={"a": None}), "the metric 'a' is a NoneType; .*; correct the workflow$"),  # type: ignore[dict-item]
    ],
)
def test_unusable_output_fails_the_run(engine: FakeEngine, output: Callable[[], Any], message: str) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> Any:
        await model.chat([{"role": "user", "content": "hello"}])
        return output()

    with pytest.raises(UserCodeError, match=message):
        explore(engine, workflow, max_retries=0)


def test_run_without_a_call_fails(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        return WorkflowOutput(reward=1.0)

    with pytest.raises(UserCodeError, match="without a recorded model call"):
        explore(engine, workflow, max_retries=0)


def test_dead_engine_ends_the_batch(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        engine.dead = True
        await asyncio.to_thread(engine.shutdown)
        try:  # an agent may hide the failure; the runner knows of it all the same
            await model.get_openai_async_client().with_options(max_retries=0).models.list()
            await model.chat([{"role": "user", "content": "hello"}])
        except Exception:
            return WorkflowOutput(response="sorry")
        return WorkflowOutput(response="fine")

    with pytest.raises(EngineError, match="does not answer"):
        explore(engine, workflow, concurrency=1)


def test_auxiliary_models_and_logger_are_passed_by_name(engine: FakeEngine) -> None:
    seen: list[Any] = []

    async def workflow(logger: Any, auxiliary_models: Any, model: ModelHandle, task: dict[str, Any]) -> WorkflowOutput:
        seen.append((auxiliary_models, logger.name))
        return WorkflowOutput(response=(await model.chat([{"role": "user", "content": "hello"}]))["content"])

    explore(engine, workflow, count=1, repeat_times=1, auxiliary_models={"judge": "another model"})
    assert seen == [({"judge": "another model"}, "rft_platform.rollout")]


def test_concurrent_calls_of_one_run_keep_their_order(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(model.chat([{"role": "user", "content": name}]))
        return WorkflowOutput(response="done")

    batch = explore(engine, workflow, count=1, repeat_times=1)
    assert [(row.step, row.messages[0]["content"]) for row in batch.rows] == [(0, "a"), (1, "b"), (2, "c")]


def test_rows_sampled_under_a_grammar_are_not_trained(engine: FakeEngine) -> None:
    engine.constrained = True
    batch = explore(engine, ask_once)
    assert not any(any(row.loss_mask) for row in batch.rows) and all(row.loss_mask for row in batch.rows)
    assert batch.report.constrained_rows == 6
    engine.constrained = False
    assert explore(engine, ask_once).report.constrained_rows == 0


def test_calls_that_the_agent_broke_off_are_counted(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        create: Any = model.get_openai_async_client().chat.completions.create
        async with await create(model="m", messages=[{"role": "user", "content": "plan"}], stream=True) as stream:
            await anext(aiter(stream))  # has what it wants
        return await ask_once(task, model)

    batch = explore(engine, workflow, repeat_times=1)
    assert [row.metrics for row in batch.rows] == [{"unfinished_calls": 1.0}] * 3
    assert batch.report.unfinished_calls == 3 == RolloutReport.merge([batch.report]).as_dict()["unfinished_calls"]
    assert explore(engine, ask_once).report.unfinished_calls == 0


def test_a_workflow_object_gets_a_task_of_its_own(engine: FakeEngine) -> None:
    class Notes(Custom):
        async def run(self, task: Task, *rest: Any) -> WorkflowOutput:
            task.raw.setdefault("notes", []).append(1)
            output = await super().run(task, *rest)
            return replace(output, response=len(task.raw["notes"]))

    given = tasks(1)
    batch = run_rollouts(engine, given, Notes(1), round=1, batch=0, repeat_times=3, sampling=SamplingParams(64))
    assert [row.run_output for row in batch.rows] == [1, 1, 1] and "notes" not in given[0].raw


def test_unstamped_answers_take_the_engines_version(engine: FakeEngine) -> None:
    engine.stamps_version = False
    assert explore(engine, ask_once).report.policy_versions == (7,)


def test_reports_add_up(engine: FakeEngine) -> None:
    first, second = explore(engine, ask_once), explore(engine, ask_once, batch=1)
    engine.policy_version = 9
    third = explore(engine, ask_once, batch=2)
    merged = RolloutReport.merge([first.report, second.report, third.report])
    assert (merged.runs, merged.rows, merged.policy_versions) == (18, 18, (7, 9))
    assert merged.completion_tokens == sum(len(row.response_ids) for b in (first, second, third) for row in b.rows)


def test_recorded_calls_are_what_workflows_see(engine: FakeEngine) -> None:
    kinds: list[type] = []

    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        await model.chat([{"role": "user", "content": "hello"}])
        kinds.extend(type(call) for call in model.extract_experience_from_history(clear_history=False))
        return WorkflowOutput(response=len(model.extract_experience_from_history()))

    (row,) = explore(engine, workflow, count=1, repeat_times=1).rows
    assert kinds == [ModelCall] and row.run_output == 1
