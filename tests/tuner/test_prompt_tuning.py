"""``tune_prompt()`` as ``agentscope.tuner`` has it: the caller's workflow, a judge, a model that proposes prompts."""

import functools
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.tuner import DatasetConfig, JudgeOutput, PromptTuneConfig, WorkflowOutput, tune_prompt
from tests.judging.conftest import JudgeServer

START, BETTER = "You add.", "You add, and answer with the number alone."


async def solve(task: dict[str, Any], system_prompt: str) -> WorkflowOutput:
    total = str(task["a"] + 1)
    return WorkflowOutput(response=total if "alone" in system_prompt else f"It is {total}." if task["a"] else total)


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    return JudgeOutput(reward=float(response == str(task["a"] + 1)))


def proposed(question: str) -> str:
    assert "You add" in question and '"a": ' in question and "reward" in question
    return f"```\n{BETTER}\n```"


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    server = JudgeServer(proposed)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setenv("OPENAI_BASE_URL", server.model["base_url"])
    monkeypatch.setenv("OPENAI_API_KEY", "sk-anything-at-all")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    for split, count in (("train", 6), ("test", 4)):
        rows = "".join(json.dumps({"a": number}) + "\n" for number in range(count))
        (tmp_path / f"{split}.jsonl").write_text(rows)
    return {
        "workflow": solve, "judge_func": judge, "init_system_prompt": START,
        "train_dataset": DatasetConfig(path=str(tmp_path)),
        "eval_dataset": DatasetConfig(path=str(tmp_path), split="test"),
        "config": PromptTuneConfig(lm_model_name="openai/grader", eval_display_table=2),
    }  # fmt: skip


def test_the_better_prompt_is_returned_with_its_gain(
    provider: JudgeServer, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune_prompt(**given) == (BETTER, {"valset_improvement": 300.0})  # from a quarter to all tasks
    assert provider.requests[0]["model"] == "grader"
    assert capsys.readouterr().out == '1\t{"a": 0}\n1\t{"a": 1}\n'


async def test_a_notebook_may_call_it_without_an_evaluation(provider: JudgeServer, given: dict[str, Any]) -> None:
    assert tune_prompt(**{**given, "eval_dataset": None}) == (BETTER, {})


def test_a_judge_may_have_all_parameters(provider: JudgeServer, given: dict[str, Any]) -> None:
    def judge_all(task: dict[str, Any], response: str, auxiliary_models: Any, logger: Any) -> JudgeOutput:
        logger.debug("judging")
        return JudgeOutput(reward=float(response == str(task["a"] + 1)) - len(auxiliary_models))

    assert tune_prompt(**{**given, "judge_func": judge_all}) == (BETTER, {"valset_improvement": 300.0})


def test_functions_may_be_sync_and_some_tasks_may_fail(provider: JudgeServer, given: dict[str, Any]) -> None:
    def fails_once(task: dict[str, Any], system_prompt: str) -> WorkflowOutput:
        if task["a"] == 2:
            raise RuntimeError("no answer")
        return WorkflowOutput(response="1" if "alone" in system_prompt and task["a"] == 0 else "?")

    assert tune_prompt(**{**given, "workflow": fails_once})[0] == BETTER
    with pytest.raises(UserCodeError, match=r"failed on every task; the first error: .*KeyError"):
        tune_prompt(**{**given, "judge_func": lambda task, response: JudgeOutput(reward=task["missing"])})


def test_async_functions_may_be_decorated_or_objects(provider: JudgeServer, given: dict[str, Any]) -> None:
    @functools.wraps(solve)
    def decorated(*args: Any, **arguments: Any) -> Any:
        return solve(*args, **arguments)

    class Judge:
        async def __call__(self, task: dict[str, Any], response: str) -> JudgeOutput:
            return await judge(task, response)

    found = tune_prompt(**{**given, "workflow": decorated, "judge_func": Judge()})
    assert found == (BETTER, {"valset_improvement": 300.0})


def test_as_many_tasks_run_at_the_same_time_as_configured(
    provider: JudgeServer, given: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"a": number}) + "\n" for number in range(64)))
    together, started = threading.Barrier(40), itertools.count()  # asyncio's own pool has 32 threads at most

    def waits(task: dict[str, Any], system_prompt: str) -> WorkflowOutput:
        if next(started) < together.parties:
            together.wait(timeout=10)
        return WorkflowOutput(response=str(task["a"] + 1))

    settings = PromptTuneConfig(
        lm_model_name="openai/grader", eval_num_threads=together.parties, optimization_level="medium"
    )
    assert tune_prompt(**{**given, "workflow": waits, "eval_dataset": None, "config": settings}) == (START, {})
    assert not together.broken


def test_a_reward_that_is_no_number_counts_0(provider: JudgeServer, given: dict[str, Any]) -> None:
    async def divides(task: dict[str, Any], response: str) -> Any:
        """Returns an output as AgentScope's: the platform's own refuses such rewards."""
        return SimpleNamespace(reward=float("nan") if task["a"] == 2 else float(response == str(task["a"] + 1)))

    assert tune_prompt(**{**given, "judge_func": divides}) == (BETTER, {"valset_improvement": 200.0})  # to 3 of 4


def test_a_failed_task_does_not_count_more_than_the_lowest_reward(provider: JudgeServer, given: dict[str, Any]) -> None:
    async def costs(task: dict[str, Any], response: str) -> JudgeOutput:
        return JudgeOutput(reward=-1.0)

    async def fails_when_alone(task: dict[str, Any], system_prompt: str) -> WorkflowOutput:
        if "alone" in system_prompt:
            raise RuntimeError("no answer")
        return WorkflowOutput(response="?")

    found = tune_prompt(**{**given, "workflow": fails_when_alone, "judge_func": costs})
    assert found == (START, {"valset_improvement": 0.0})


@pytest.mark.parametrize(("before", "gain"), [(-0.5, {"valset_improvement": 60.0}), (0.0, {})])
def test_the_gain_is_relative_to_the_size_of_the_first_reward(
    provider: JudgeServer, given: dict[str, Any], before: float, gain: dict[str, float]
) -> None:
    async def costs(task: dict[str, Any], response: str) -> JudgeOutput:
        return JudgeOutput(reward=before + 0.3 * (response == "better"))

    async def answers(task: dict[str, Any], system_prompt: str) -> WorkflowOutput:
        return WorkflowOutput(response="better" if "alone" in system_prompt else "worse")

    prompt, found = tune_prompt(**{**given, "workflow": answers, "judge_func": costs})
    assert (prompt, found) == (BETTER, pytest.approx(gain))


def test_what_cannot_be_used_is_refused(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Missing essential parameters: \\['system_prompt'\\]"):
        tune_prompt(**{**given, "workflow": lambda task: WorkflowOutput()})
    with pytest.raises(UserError, match="'openai/grader': the environment variable OPENAI_API_KEY is not set"):
        tune_prompt(**given)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-anything-at-all")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    for name in ("grader", "anthropic/x"):
        with pytest.raises(UserError, match="expected openai/NAME or dashscope/NAME"):
            tune_prompt(**{**given, "config": PromptTuneConfig(lm_model_name=name)})
    with pytest.raises(TypeError, match="PromptTuneConfig has no field"):
        PromptTuneConfig(model="x")
