"""What judges are given, and what happens to those that are slow, hang, or lean on an endpoint that is not there."""

import asyncio
import logging
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import openai
import pytest

from rft_platform.common.errors import JudgeUnavailableError, UserCodeError, UserError
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.judging.judged_run import JudgedRun, judged_run
from rft_platform.judging.types import check_judge_function

from .conftest import TASKS, JudgeServer, a_row, run_rows

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def tool_run() -> list[Any]:
    """Two calls of tools, of which one is answered, then the end."""
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{broken"}},
    ]
    asked = [{"role": "user", "content": "?"}]
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "1"}]}
    later = [*asked, {"role": "assistant", "content": None, "tool_calls": calls}, result]
    return [
        a_row("r", 0, None, messages=asked, tools=TOOLS, tokens=3, tool_calls=calls),
        a_row("r", 1, "done", messages=later, tools=TOOLS, tokens=2),
    ]


def test_a_judge_may_ask_for_the_run() -> None:
    seen: list[JudgedRun] = []

    def judge(task: dict[str, Any], response: Any, run: JudgedRun) -> float:
        seen.append(run)
        return 1.0

    assert judge_runs(tool_run(), TASKS, build_judge(judge))[0].reward == 1.0
    (run,) = seen
    assert [message["role"] for message in run.messages] == ["user", "assistant", "tool", "assistant"]
    assert [(call.name, call.arguments, call.result, call.step, call.is_json) for call in run.tool_calls] == [
        ("add", {"a": 1}, "1", 0, True),
        ("add", "{broken", None, 0, False),
    ]
    assert (run.response_tokens, len(run.steps), run.truncated, list(run.tools)) == (5, 2, False, TOOLS)
    assert judged_run(tool_run()) == run
    with pytest.raises(ValueError, match=r"disallowed parameters: \['run'\]"):
        check_judge_function(judge)  # the strict check stays as it is


def test_every_call_gets_a_task_of_its_own() -> None:
    def greedy(task: dict[str, Any], response: Any) -> float:
        task["seen"].append(response)
        return float(len(task["seen"]))

    def of_group(task: dict[str, Any], responses: list[Any]) -> list[float]:
        task["seen"] += responses
        return [float(len(task["seen"]))] * len(responses)

    task = replace(TASKS["t"], raw={**TASKS["t"].raw, "seen": []})
    for judge, reward in ((greedy, 1.0), (of_group, 3.0)):
        runs = judge_runs(run_rows(["a", "b", "c"]), {"t": task}, build_judge(judge))
        assert [run.reward for run in runs] == [reward] * 3
    assert task.raw["seen"] == []


def test_results_belong_to_their_step_where_ids_are_used_again() -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "now", "arguments": ""}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    history = [{"role": "user", "content": "?"}]
    rows = []
    for step in range(3):
        rows.append(a_row("r", step, None, messages=list(history), tool_calls=[call]))
        history += [said, {"role": "tool", "tool_call_id": "call_0", "content": f"{step} o'clock"}]
    assert [call.result for call in judged_run(rows).tool_calls] == ["0 o'clock", "1 o'clock", None]


def test_judges_get_the_models_and_a_logger() -> None:
    seen: dict[str, Any] = {}

    def judge(task: Any, response: Any, auxiliary_models: Any, logger: Any) -> float:
        seen.update(models=auxiliary_models, logger=logger)
        return 0.0

    judge_runs(run_rows(["a"]), TASKS, build_judge(judge))
    assert seen["models"] == {} and isinstance(seen["logger"], logging.Logger)


def test_blocking_judges_run_beside_each_other_and_beside_the_loop() -> None:
    together = threading.Barrier(8)

    def waits(task: Any, response: Any) -> float:
        together.wait(timeout=20)  # for all eight, or it fails
        return 1.0

    assert [run.reward for run in judge_runs(run_rows(["a"] * 8), TASKS, build_judge(waits))] == [1.0] * 8


def test_a_judge_that_hangs_costs_its_own_run_alone() -> None:
    over = threading.Event()

    def hangs(task: Any, response: Any) -> float:
        if response == "hang":
            over.wait(30)
        return 1.0

    async def hangs_too(task: Any, response: Any) -> float:
        if response == "hang":
            await asyncio.sleep(30)
        return 1.0

    started = time.perf_counter()
    for judge in (hangs, hangs_too):
        good, bad = judge_runs(run_rows(["a", "hang"]), TASKS, replace(build_judge(judge), timeout_s=0.3))
        assert good.reward == 1.0
        assert str(bad.error).startswith("TimeoutError: the judge took longer than 0.3 s (judge_timeout_s)")
    assert time.perf_counter() - started < 10
    over.set()


def test_a_judge_that_exits_is_a_judge_that_failed() -> None:
    def leaves(task: Any, response: Any) -> float:
        if response == "x":
            raise SystemExit(3)
        if response == "y":
            raise StopIteration
        return 1.0

    runs = judge_runs(run_rows(["a", "x", "y"]), TASKS, build_judge(leaves))
    first, *failed = [str(run.error).partition(" (")[0] for run in runs]  # the place comes after it
    assert (first, failed) == ("None", ["RuntimeError: SystemExit: 3", "RuntimeError: StopIteration: "])


class Halt(BaseException):
    """No Exception, as the cancellation of another event loop's library."""


class Unreadable:
    """A verdict whose attribute ends the caller."""

    @property
    def reward(self) -> float:
        raise Halt("no reward")


def test_whatever_a_judge_raises_fails_its_own_run_alone() -> None:
    def raise_error(response: str) -> Any:
        if response == "unreadable":
            return Unreadable()
        if response == "cancel":
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            return 1.0
        errors: dict[str, BaseException] = {"exit": SystemExit(3), "halt": Halt("stop"), "close": GeneratorExit()}
        raise {**errors, "interrupt": KeyboardInterrupt(), "cancelled": asyncio.CancelledError()}[response]

    async def judge(task: Any, response: Any) -> Any:
        return 1.0 if response == "a" else raise_error(response)

    async def gathers(task: Any, response: Any) -> Any:
        return (await asyncio.gather(judge(task, response), asyncio.sleep(0)))[0]

    expected = {
        "exit": "SystemExit: 3", "halt": "Halt: stop", "close": "GeneratorExit:", "unreadable": "Halt: no reward",
        "cancelled": "RuntimeError: the judge cancelled itself; the platform did not cancel it",
    }  # fmt: skip
    for function, texts in ((judge, {**expected, "interrupt": "KeyboardInterrupt:"}), (gathers, expected)):
        runs = judge_runs(run_rows(["a", *texts, "a"]), TASKS, build_judge(function))
        assert [run.reward for run in runs if run.error is None] == [1.0, 1.0]
        found = [str(run.error).partition(" (")[0].strip() for run in runs if run.error is not None]
        assert found == list(texts.values())

    async def judge_group(task: Any, responses: Any) -> Any:
        return [1.0, raise_error("halt")]

    with pytest.raises(UserCodeError, match="the judge failed on all 2 runs; the first: Halt: stop"):
        judge_runs(run_rows(["a", "b"]), TASKS, build_judge(judge_group))


def test_a_judge_that_needs_signals_has_the_main_thread() -> None:
    def alarms(task: Any, response: Any) -> float:
        previous = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, previous)
        return 1.0

    assert judge_runs(run_rows(["a"]), TASKS, build_judge(alarms))[0].reward == 1.0


def test_an_unreachable_model_of_a_users_judge_gives_no_rewards(endpoint: JudgeServer) -> None:
    client = openai.OpenAI(base_url=endpoint.model["base_url"], api_key="k", max_retries=0)

    def asks(task: Any, response: Any) -> float:
        if response == "a":
            return 1.0
        said = client.chat.completions.create(model="m", messages=[{"role": "user", "content": response}])
        return float(said.choices[0].message.content or 0)

    endpoint.say = lambda prompt: "0.25"
    assert [run.reward for run in judge_runs(run_rows(["a", "b"]), TASKS, build_judge(asks))] == [1.0, 0.25]
    endpoint.failures = [500]
    with pytest.raises(JudgeUnavailableError, match=r"a model that the judge calls does not answer: .*status 500"):
        judge_runs(run_rows(["a", "b"]), TASKS, build_judge(asks))
    client.close()


def test_judges_declare_whether_they_call_models() -> None:
    def asks(task: Any, response: Any, auxiliary_models: Any) -> float:
        return 1.0

    endpoint = {"base_url": "http://x/v1", "model": "m"}
    assert build_judge(asks).asks_models
    assert build_judge("llm", {"model": "critic", "criteria": {"a": "b"}}).asks_models
    assert not build_judge("llm", {"model": endpoint, "criteria": {"a": "b"}}).asks_models
    assert not build_judge("exact_match").asks_models
    with pytest.raises(UserError, match="question_key"):
        build_judge("llm", {"model": "critic", "criteria": {"a": "b"}}, prompt_key=None)
