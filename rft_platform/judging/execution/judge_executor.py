"""Call the parts of a judge for many runs concurrently, within time limits.

A part judges one run or a whole group. It is called in the event loop or in a thread.
"""

import asyncio
import copy
import inspect
import logging
import math
import sqlite3
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from rft_platform.cluster.this_process import interruptible_loop
from rft_platform.common.errors import JudgeUnavailableError, UserError
from rft_platform.common.fault_classification import described, user_place
from rft_platform.common.threads import UserCodeLoop, await_user_code, call_in_thread, is_cancellation
from rft_platform.experience.record import METRIC_EXPECTED, is_metric_value, valid_text
from rft_platform.judging.execution.compose import JudgePart, JudgeSpec, PartCaller
from rft_platform.judging.judge_context import JudgeContext, JudgeState
from rft_platform.judging.judged_run import JudgedRun

Result = TypeVar("Result")

CONCURRENCY = 16  # runs (or groups) that are judged at a time
_SHOWN = 80  # characters of an invalid result in a message
_ERROR_CHARACTERS = 300  # of an error, which is stored with each row of the run
_log = logging.getLogger("rft_platform.judging")


@dataclass(frozen=True, slots=True)
class RunToJudge:
    """What judges see of one run."""

    group_id: str
    task: dict[str, Any]  # the dataset's row
    response: Any
    run: JudgedRun
    document: Any = None  # the workflow's output as it is stored; None: the response is the text of the last answer


class JudgeResultError(TypeError):
    """A judge returned something that is not a reward."""


@dataclass(slots=True)
class Verdict:
    """Results of a judge's parts for one run: values by part and metric, or the error of the first part that failed."""

    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)  # by policy, for policies with another reward
    of_policies: dict[str, dict[str, float]] = field(default_factory=dict)  # by part and policy: rewards from that part

    def add(self, part: JudgePart, output: Any) -> None:
        """Add the result of a part: a number, or a ``JudgeOutput`` (an object of another library may have its fields).

        Raises JudgeResultError for anything else, and for a metric that is NaN or infinite.
        """
        value = _number(part, "", getattr(output, "reward", output), output)
        self.parts[part.name] = value
        for name, metric in (getattr(output, "metrics", None) or {}).items():
            self.parts[valid_text(f"{part.name}/{name}")] = _number(part, f"metric {name!r}: ", metric, metric)
            if not is_metric_value(metric):
                raise _wrong_result(part, f"metric {name!r}: ", metric, METRIC_EXPECTED)
        rewards = getattr(output, "rewards", None) or {}
        self.of_policies[part.name] = {
            str(name): _number(part, f"reward of {name!r}: ", reward, reward) for name, reward in rewards.items()
        }

    def merge(self, other: "Verdict") -> None:
        """Add what other parts found."""
        self.parts |= other.parts
        self.of_policies |= other.of_policies
        self.error = self.error or other.error

    def fail(self, error: BaseException) -> None:
        """Record why there is no verdict. Only the first reason is kept."""
        says_all = isinstance(error, JudgeResultError)
        text, place = (str(error), None) if says_all else (described(error), user_place(error))
        cut = text if len(text) <= _ERROR_CHARACTERS else f"{text[:_ERROR_CHARACTERS]}…"
        self.error = self.error or f"{cut}{f' ({place})' if place else ''}"

    def sum(self, judge: JudgeSpec) -> None:
        """Compute the reward from the parts.

        For a policy that a part does not name, the part's reward for the first policy is used.
        """
        if self.error is not None:
            return
        self.reward = sum(part.weight * self.parts[part.name] for part in judge.parts)
        for name in {name for rewards in self.of_policies.values() for name in rewards}:
            values = [self.of_policies[part.name].get(name, self.parts[part.name]) for part in judge.parts]
            self.rewards[name] = sum(part.weight * value for part, value in zip(judge.parts, values, strict=True))
        for reward in (self.reward, *self.rewards.values()):
            if not math.isfinite(reward):
                self.error = f"the reward is {reward}; expected a finite number"


def judge_all(
    runs: Sequence[RunToJudge], judge: JudgeSpec, state: JudgeState, auxiliary_models: Mapping[str, Any]
) -> list[Verdict]:
    """Return a verdict for each run, in the order of ``runs``.

    If the caller is in a running event loop, the judge pass uses another thread with its own event loop.
    ``CONCURRENCY`` runs (or groups) are judged at a time, more if a judge with a model allows more concurrent requests.

    Raises JudgeUnavailableError if a judge model does not answer, and UserError if the judge can never be called
    (missing API key, spent budget).
    """
    return _wait(JudgePass(judge, auxiliary_models).all(runs, state))


class JudgePass:
    """One call that judges many runs."""

    def __init__(self, judge: JudgeSpec, auxiliary_models: Mapping[str, Any]) -> None:
        self._judge, self._auxiliary_models = judge, dict(auxiliary_models)
        self._takes = {part.name: frozenset(inspect.signature(part.function).parameters) for part in judge.parts}
        widest = max(getattr(part.function, "concurrency", 1) for part in judge.parts)
        self._concurrency = max(CONCURRENCY, widest)
        self._workers: PartCaller | None = None

    async def all(self, runs: Sequence[RunToJudge], state: JudgeState) -> list[Verdict]:
        """One verdict per run, in the order of ``runs``."""
        verdicts = [Verdict() for _ in runs]
        context = JudgeContext(state, self._auxiliary_models, self._judge.timeout_s)
        groups: dict[str, list[int]] = {}
        for number, run in enumerate(runs):
            groups.setdefault(run.group_id, []).append(number)
        alone = [part for part in self._judge.parts if not part.group]
        together = [part for part in self._judge.parts if part.group]
        of_runs = (self._judge_run(run, alone, verdict, context) for run, verdict in zip(runs, verdicts, strict=True))
        of_groups = (
            self._judge_group([runs[n] for n in numbers], part, [verdicts[n] for n in numbers], context)
            for part in together
            for numbers in groups.values()
        )
        try:
            async with AsyncExitStack() as stack:
                if self._judge.workers is not None and any(part.reference for part in self._judge.parts):
                    calling = self._judge.workers.calling(self._judge, self._auxiliary_models, self._concurrency)
                    self._workers = await stack.enter_async_context(calling)
                await _together(chain(of_runs, of_groups), self._concurrency)
        finally:
            await context.aclose()
        for verdict in verdicts:
            verdict.sum(self._judge)
        return verdicts

    async def part(self, part: JudgePart, runs: Sequence[RunToJudge], context: JudgeContext) -> list[Verdict]:
        """The verdicts of one part on a run, or on the runs of a group, in this process."""
        verdicts = [Verdict() for _ in runs]
        if part.group:
            await self._judge_group(runs, part, verdicts, context)
        else:
            await self._judge_run(runs[0], [part], verdicts[0], context)
        return verdicts

    async def _judge_run(
        self, run: RunToJudge, parts: Sequence[JudgePart], verdict: Verdict, context: JudgeContext
    ) -> None:
        for part in parts:
            if await self._judged_elsewhere(part, [run], [verdict]):
                if verdict.error is not None:
                    return
                continue
            arguments = {"task": run.task, "response": run.response, "run": run.run}
            try:
                verdict.add(part, await self._call(part, arguments, context))
            except BaseException as error:
                verdict.fail(_own_failure(error, part, run.run.run_id))
                return

    async def _judged_elsewhere(self, part: JudgePart, runs: Sequence[RunToJudge], verdicts: Sequence[Verdict]) -> bool:
        """Whether a worker has judged, because the part is a user's function and there are workers for it."""
        if self._workers is None or part.reference is None:
            return False
        for verdict, found in zip(verdicts, await self._workers.judge(part, runs), strict=True):
            verdict.merge(found)
        return True

    async def _judge_group(
        self, runs: Sequence[RunToJudge], part: JudgePart, verdicts: Sequence[Verdict], context: JudgeContext
    ) -> None:
        if await self._judged_elsewhere(part, runs, verdicts):
            return
        arguments = {
            "task": runs[0].task,
            "responses": [run.response for run in runs],
            "runs": [run.run for run in runs],
        }
        try:
            outputs = await self._call(part, arguments, context)
            if not isinstance(outputs, Iterable) or isinstance(outputs, str | Mapping):
                raise _wrong_result(part, "", outputs, f"a list of {len(runs)} rewards")
            outputs = list(outputs)
            if len(outputs) != len(runs):
                raise ValueError(f"the judge returned {len(outputs)} rewards for the {len(runs)} runs of a group")
        except BaseException as error:
            failure = _own_failure(error, part, f"{runs[0].run.run_id} and the others of its group")
            for verdict in verdicts:
                verdict.fail(failure)
            return
        for output, verdict in zip(outputs, verdicts, strict=True):
            try:
                verdict.add(part, output)
            except BaseException as error:
                verdict.fail(error)

    async def _call(self, part: JudgePart, inputs: dict[str, Any], context: JudgeContext) -> Any:
        """Call a part. Rules run in the event loop: they are quick, or wait for a process that has a time limit."""
        offered = {**inputs, "auxiliary_models": self._auxiliary_models, "logger": _log}
        if part.builtin:
            offered["context"] = context
        else:  # a function may change its arguments: other parts and other runs must not see the change
            offered["task"] = copy.deepcopy(inputs["task"])
        takes = self._takes[part.name]
        arguments = {**{name: value for name, value in offered.items() if name in takes}, **part.args}
        if part.builtin:
            output = part.function(**arguments)
            return await output if inspect.isawaitable(output) else output
        try:
            async with asyncio.timeout(self._judge.timeout_s) as limit:
                return await await_user_code(_called(part.function, arguments), "judge")
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"the judge took longer than {self._judge.timeout_s:g} s (judge_timeout_s)") from error


def _number(part: JudgePart, what: str, value: Any, output: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise _wrong_result(part, what, output, "a number" if what else "a number or JudgeOutput") from error


def _wrong_result(part: JudgePart, what: str, output: Any, expected: str) -> JudgeResultError:
    code = getattr(part.function, "__code__", None)
    name = part.name if code is None else f"{Path(code.co_filename).name}:{code.co_name}"
    shown = repr(output)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return JudgeResultError(f"judge {name} returned {what}{shown}; expected {expected}")


def _own_failure(error: BaseException, part: JudgePart, run_id: str) -> BaseException:
    """Return ``error`` if one run caused it; raise a cancellation, or an error that the judge or the machine caused."""
    if is_cancellation(error) or isinstance(error, JudgeUnavailableError | UserError):
        raise error
    machine = isinstance(error, sqlite3.Error | OSError) and not isinstance(error, TimeoutError)
    if part.builtin and machine:  # for example a full disk, or no process could be started
        raise error
    if _is_unanswered(error):
        raise JudgeUnavailableError(f"a model that the judge calls does not answer: {error}") from error
    _log.debug("judge failed on run %s: %r", run_id, error)
    return error


def _is_unanswered(error: BaseException) -> bool:
    """Whether the judge failed because an OpenAI endpoint gave no answer; a run cannot cause this."""
    openai: Any = sys.modules.get("openai")
    return openai is not None and isinstance(
        error, openai.APIConnectionError | openai.RateLimitError | openai.InternalServerError
    )


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def _together(jobs: Iterator[Coroutine[Any, Any, None]], concurrency: int) -> None:
    """Run all jobs, ``concurrency`` at a time; the first that raises cancels the others."""

    async def work() -> None:
        for job in jobs:
            await job
            await asyncio.sleep(0)  # a job that waits for nothing must not delay the others, or a cancellation

    tasks = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _wait(job: Coroutine[Any, Any, Result]) -> Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with interruptible_loop():
            return _run(job)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(_run, job).result()


def _run(job: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=UserCodeLoop) as runner:
        return runner.run(job)


async def _called(function: Any, arguments: Mapping[str, Any]) -> Any:
    output = function(**arguments) if _is_async(function) else await _call_blocking(function, arguments)
    return await output if inspect.isawaitable(output) else output


async def _call_blocking(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a blocking function in its own thread and return its result. If the caller is cancelled, the thread runs on.

    The process does not wait for such a thread when it ends. Only the main thread can use signals: a function that
    uses them is called in the caller's thread if that is the main thread.
    """
    try:
        return await call_in_thread(function, arguments)
    except ValueError as error:
        if threading.current_thread() is not threading.main_thread() or not any(map(_wants_signals, _chain(error))):
            raise
    return function(**arguments)


def _wants_signals(error: BaseException) -> bool:
    return "signal only works in main thread" in str(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
