"""One odd value of one run never costs the others: it is normalised, or that run fails alone and is named.

Values go the whole way: workflow, recorder, HTTP, rows, Parquet, SQL views, judge, judged rows.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rft_platform.common.files import write_json
from rft_platform.experience.queries import connect
from rft_platform.experience.record import LARGEST_TOP_K
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.interface import SamplingParams
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_rollouts
from rft_platform.judging.types import JudgeOutput
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.runner.run_rollouts import SingleTurn
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.tasks.task import Task

from .fake_engine import FakeEngine
from .samples import roll_out, tasks

LONE = "\ud83d"  # half of an emoji


def nested(depth: int, kind: type = list) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


texts = st.text(st.characters(exclude_categories=()), max_size=5) | st.sampled_from([LONE, "\0", "a" * 300, "$class"])
numbers = st.sampled_from([2**31, 2**63, -(2**70), 10**400, 1e308, float("inf"), float("nan"), -0.0]) | (
    st.integers() | st.floats() | st.builds(pow, st.just(10), st.just(5000))  # more digits than Python prints
)
leaves = st.none() | st.booleans() | numbers | texts | st.binary(max_size=3)
odd = (
    st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts | numbers, inner, max_size=2),
        max_leaves=5,
    )
    | st.sampled_from([object(), {1, 2}, np.float32(1.5), np.zeros(2), int, ("a", LONE)])
    | st.builds(nested, st.sampled_from([150, 250, 5_000]), st.sampled_from([list, dict]))
)
fields = st.sampled_from(
    ["reward", "step_reward", "metrics", "env_state_hash", "response_ids", "rollout_logprobs", "messages"]
) | (
    st.sampled_from(["response", "tools", "top_k", "temperature", "finish_reason", "policy", "order", "policy_version"])
)
samplings = st.fixed_dictionaries(
    {}, optional={"top_k": numbers, "top_p": numbers, "temperature": numbers, "seed": odd}
)


def explored(engine: FakeEngine, workflow: Any, **options: Any) -> RolloutBatch:
    values = {"round": 1, "batch": 0, "repeat_times": 2, "sampling": SamplingParams(max_tokens=64), **options}
    return roll_out(engine, tasks(2), workflow, max_retries=0, **values)


def check_batch(batch: RolloutBatch) -> None:
    """The good task's rows are there, and all rows go to Parquet, SQL and a note, and come back."""
    assert sum(row.task_id == "task-1" for row in batch.rows) == 2
    with tempfile.TemporaryDirectory() as folder:
        store = ExperienceStore(Path(folder))
        store.write_rollouts(1, 0, batch.rows)
        assert [row.row_id for row in store.rollout_rows(1)] == [row.row_id for row in batch.rows]
        with connect(store) as connection:
            counted = connection.execute("SELECT count(*) FROM (SELECT * FROM conversations)").fetchone()
            assert counted == (len({row.run_id for row in batch.rows}),)
            connection.execute("SELECT json_type(run_output), json_type(response) FROM rollouts").fetchall()
        write_json(Path(folder) / "note.json", batch.report.as_dict())


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    response=odd, metrics=st.none() | st.dictionaries(texts | numbers, odd, max_size=2), reward=odd, sampling=samplings
)
@example(response=LONE, metrics={LONE: 1.0}, reward=None, sampling={"top_k": 2**31})
@example(response={LONE: [LONE]}, metrics={"unfinished_calls": float("nan")}, reward=1.0, sampling={})
@example(response=nested(250), metrics=None, reward=1.0, sampling={"top_k": 10**30})
def test_outputs_and_sampling(engine: FakeEngine, response: Any, metrics: Any, reward: Any, sampling: Any) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        bad = task["question"] == "question 0"
        client: Any = model.get_openai_async_client()
        asked: Any = [{"role": "user", "content": task["question"]}]
        extra = sampling if bad else {}
        await client.chat.completions.create(model=model.model_name, messages=asked, extra_body=extra)
        return WorkflowOutput(reward, response, metrics) if bad else WorkflowOutput(1.0, "fine")

    check_batch(explored(engine, workflow))


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(name=fields, value=odd)
@example(name="env_state_hash", value=LONE)
@example(name="top_k", value=2**40)
@example(name="response_ids", value=[1])
@example(name="messages", value=[{"role": "user", "content": nested(250)}])
@example(name="metrics", value={LONE: float("nan")})
def test_fields_that_a_workflow_sets(engine: FakeEngine, name: str, value: Any) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> Any:
        await model.chat([{"role": "user", "content": task["question"]}])
        calls = model.extract_experience_from_history()
        for call in calls:
            call.reward = 1.0
            if task["question"] == "question 0":
                setattr(call, name, value)
        return calls

    check_batch(explored(engine, workflow))


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(extra=odd)
@example(extra=float("nan"))
def test_messages_of_a_workflow_of_one_call(engine: FakeEngine, extra: Any) -> None:
    class Odd(SingleTurn):
        def messages(self, task: Task) -> list[dict[str, Any]]:
            more = {"note": extra} if task.task_id == "task-0" else {}
            return [{"role": "user", "content": task.prompt, **more}]

    check_batch(explored(engine, Odd()))


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reward=odd, metrics=st.none() | st.dictionaries(texts | numbers, odd, max_size=2), message=texts)
@example(reward=1.0, metrics={LONE: float("inf")}, message="")
@example(reward=None, metrics=None, message=LONE)
def test_odd_results_of_a_judge(engine: FakeEngine, reward: Any, metrics: Any, message: str) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        return WorkflowOutput(response=(await model.chat([{"role": "user", "content": task["question"]}]))["content"])

    async def judge(task: dict[str, Any], response: Any) -> Any:
        return 1.0 if task["question"] == "question 1" else says[0]()

    def odd_verdict() -> JudgeOutput:
        if message:
            raise ValueError(message)
        return JudgeOutput(reward, metrics)

    says: list[Any] = []
    spec, batch = build_judge(judge), explored(engine, workflow)
    says.append(odd_verdict)  # after the judge's version is made, which covers what a judge is made of
    known = {task.task_id: task for task in tasks(2)}
    judged = judge_rollouts(batch.rows, known, spec, advantage_fn=None)
    assert [run.reward for run in judged.runs if run.task_id == "task-1"] == [1.0, 1.0]
    with tempfile.TemporaryDirectory() as folder:
        store = ExperienceStore(Path(folder))
        store.write_rollouts(1, 0, batch.rows)
        store.write_judged(1, judged.rows[0].judge_version, judged.rows)
        assert len(store.judged_rows(1)) == len(batch.rows)
        with connect(store) as connection:
            connection.execute("SELECT rewards, total_reward FROM conversations").fetchall()


def test_texts_and_numbers_are_normalised(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        client: Any = model.get_openai_async_client()
        asked: Any = [{"role": "user", "content": task["question"]}]
        await client.chat.completions.create(model=model.model_name, messages=asked, extra_body={"top_k": 2**31})
        return WorkflowOutput(1.0, {LONE: "\ud83d\ude00"}, {LONE: 1.0})

    row = explored(engine, workflow).rows[0]
    assert (row.top_k, row.run_output, row.metrics) == (LARGEST_TOP_K, {"\ufffd": "😀"}, {"\ufffd": 1.0})


def test_the_error_names_the_failed_run(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> Any:
        await model.chat([{"role": "user", "content": task["question"]}])
        (call,) = model.extract_experience_from_history()
        call.reward = 1.0
        if task["question"] == "question 0":
            call.messages = [{"content": nested(250)}]
        return [call]

    caplog.set_level(logging.WARNING)
    batch = explored(engine, workflow)
    assert {row.task_id for row in batch.rows} == {"task-1"} and batch.report.failed == 2
    (said,) = {record.getMessage() for record in caplog.records}
    assert "of task task-0, attempt 0 failed: ValueError: column messages cannot store" in said
    assert "nested more than 200 levels deep" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_a_metric_that_cannot_be_averaged_fails_its_run_alone(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        answer = await model.chat([{"role": "user", "content": task["question"]}])
        return WorkflowOutput(None, answer["content"], {"speed": value if task["question"] == "question 0" else 2.0})

    caplog.set_level(logging.WARNING)
    batch = explored(engine, workflow)
    assert [row.metrics["speed"] for row in batch.rows] == [2.0, 2.0] and batch.report.failed == 2
    (message,) = {record.getMessage() for record in caplog.records}
    assert f"of task task-0, attempt 0 failed: ValueError: the metric 'speed' is {value!r}; expected a fin" in message


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e300])
def test_a_judges_metric_that_cannot_be_averaged_fails_the_judgement_of_its_run(
    engine: FakeEngine, value: float
) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        return WorkflowOutput(response=(await model.chat([{"role": "user", "content": task["question"]}]))["content"])

    def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
        return JudgeOutput(1.0, {"speed": value if task["question"] == "question 0" else 2.0})

    known = {task.task_id: task for task in tasks(2)}
    judged = judge_rollouts(explored(engine, workflow).rows, known, build_judge(judge), advantage_fn=None)
    assert {run.task_id for run in judged.errors} == {"task-0"} and len(judged.errors) == 2
    assert f"judge test_odd_values.py:judge returned metric 'speed': {value!r}; expected a fin" in str(
        judged.errors[0].error
    )
    assert {row.reward_parts["judge/speed"] for row in judged.rows if row.dropped_by is None} == {2.0}
