"""``select_model()``, and a name of the tuner API that is refused."""

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.tuner import (
    DatasetConfig,
    JudgeOutput,
    TinkerConfig,
    WorkflowOutput,
    select_model,
)
from tests.house.documentation_blocks import block
from tests.rollout.test_auxiliary import Endpoint


@dataclass
class Candidate:
    """A model that adds wrongly by ``error``."""

    model_name: str
    error: int


async def solve(task: dict[str, Any], model: Candidate) -> WorkflowOutput:
    if task["a"] == 3 and model.error:
        raise RuntimeError("no answer")
    return WorkflowOutput(response=task["a"] + model.error)


async def judge(task: dict[str, Any], response: dict[str, Any]) -> JudgeOutput:
    assert response["metrics"]["execution_time"] >= 0
    return JudgeOutput(reward=-abs(response["response"] - task["a"]), metrics={"seen": 1.0})


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetConfig:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"a": number}) + "\n" for number in range(5)))
    return DatasetConfig(path=str(tmp_path))


async def test_the_best_candidate_is_returned_with_its_metrics(
    dataset: DatasetConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    worse, better = Candidate("worse", 2), Candidate("better", 0)
    given = {"workflow_func": solve, "judge_func": judge, "train_dataset": dataset}
    selected = await select_model(**given, candidate_models=[worse, better])
    assert selected == (better, {"seen_avg": 1.0, "reward_avg": 0.0})
    printed = capsys.readouterr().err
    assert "worse: mean reward -2.0000 on 5 tasks, 1 failed\nbetter: mean reward 0.0000 on 5 tasks\n" in printed
    assert (await select_model(**given, candidate_models=[worse, Candidate("worst", 3)]))[0] is worse


async def test_a_metric_is_averaged_over_the_tasks_that_have_it(dataset: DatasetConfig) -> None:
    async def sparse(task: dict[str, Any], response: dict[str, Any]) -> JudgeOutput:
        return JudgeOutput(reward=1.0, metrics={"odd": 4.0} if task["a"] % 2 else {})

    candidates = [Candidate("a", 0), Candidate("b", 0)]
    given = {"workflow_func": solve, "judge_func": sparse, "train_dataset": dataset}
    selected = await select_model(**given, candidate_models=candidates)
    assert selected == (candidates[0], {"odd_avg": 4.0, "reward_avg": 1.0})


async def test_a_reward_that_is_not_finite_is_a_failed_task(dataset: DatasetConfig) -> None:
    async def broken(task: dict[str, Any], response: dict[str, Any]) -> Any:
        wrong = response["response"] != task["a"] or task["a"] == 0
        return SimpleNamespace(reward=float("nan") if wrong else 1.0, metrics=None)

    good, bad = Candidate("good", 0), Candidate("bad", 1)
    given = {"workflow_func": solve, "judge_func": broken, "train_dataset": dataset}
    with pytest.raises(UserCodeError, match="bad: workflow or judge failed on every task"):
        await select_model(**given, candidate_models=[good, bad])
    assert (await select_model(**given, candidate_models=[good, Candidate("same", 0)]))[0] is good


async def test_a_failed_task_counts_as_prompt_tuning_counts_it(dataset: DatasetConfig) -> None:
    async def flaky(task: dict[str, Any], model: Candidate) -> WorkflowOutput:
        if task["a"] and model.model_name == "flaky":
            raise RuntimeError("no answer")
        return WorkflowOutput(response=task["a"] + model.error)

    async def share(task: dict[str, Any], response: dict[str, Any]) -> JudgeOutput:
        return JudgeOutput(reward=1.0 - abs(response["response"] - task["a"]) / 2)

    candidates = [Candidate("flaky", 0), Candidate("steady", 1)]
    given = {"workflow_func": flaky, "train_dataset": dataset, "candidate_models": candidates}
    assert (await select_model(**given, judge_func=share))[0] is candidates[1], "a failure counts 0"
    given["candidate_models"] = [*candidates, Candidate("worst", 3)]
    assert (await select_model(**given, judge_func=judge))[0] is candidates[1], "a failure counts -3, the worst reward"


async def test_too_few_candidates_and_failures_everywhere_are_refused(dataset: DatasetConfig) -> None:
    given = {"workflow_func": solve, "judge_func": judge, "candidate_models": [Candidate("a", 1), Candidate("b", 1)]}
    with pytest.raises(ValueError, match="at least two"):
        await select_model(**{**given, "candidate_models": []}, train_dataset=dataset)
    with pytest.raises(ValueError, match="max_threads is 0; expected at least 1"):
        await select_model(**given, train_dataset=dataset, max_threads=0)
    with pytest.raises(ValueError, match=r"'gpt-4' is not a model; expected .* AuxiliaryModel\(AuxiliarySpec\("):
        await select_model(**{**given, "candidate_models": [Candidate("a", 1), "gpt-4"]}, train_dataset=dataset)
    only_third = DatasetConfig(path=dataset.path, split="train[3:4]")
    failed = "a: workflow or judge failed on every task; the first error: RuntimeError: no answer"
    with pytest.raises(UserCodeError, match=failed):
        await select_model(**given, train_dataset=only_third)


def test_the_code_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of tune.md, with an endpoint that gives one answer to everything."""
    monkeypatch.chdir(tmp_path)
    Path("my_dataset").mkdir()
    Path("my_dataset/test.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    functions = block("docs/tune.md", 'if __name__ == "__main__"').text.partition("if __name__")[0]
    code, endpoint = block("docs/tune.md", "select_model").text, Endpoint()
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    found: dict[str, Any] = {}
    for address in ("http://127.0.0.1:8000/v1", "https://api.openai.com/v1"):
        assert address in code
        code = code.replace(address, endpoint.url)
    try:
        exec(functions + code, found)
    finally:
        endpoint.close()
    assert found["best"].model_name == "Qwen/Qwen3-0.6B" and found["metrics"] == {"reward_avg": 0.0}
    assert {body["model"] for body in endpoint.bodies} == {"Qwen/Qwen3-0.6B", "gpt-4o"}


def test_the_error_of_unsupported_features_names_the_reason() -> None:
    with pytest.raises(UserError, match="Tinker is a paid service"):
        TinkerConfig(rank=16)


async def test_the_functions_may_have_all_parameters_of_tune(dataset: DatasetConfig) -> None:
    async def solve_all(task: dict[str, Any], model: Candidate, auxiliary_models: Any, logger: Any) -> WorkflowOutput:
        logger.debug("solving")
        return WorkflowOutput(response=len(auxiliary_models) + model.error)

    def judge_all(task: dict[str, Any], response: dict[str, Any], auxiliary_models: Any, logger: Any) -> JudgeOutput:
        logger.debug("judging")
        return JudgeOutput(reward=-abs(response["response"]) - len(auxiliary_models))

    candidates = [Candidate("a", 1), Candidate("b", 0)]
    given = {"workflow_func": solve_all, "judge_func": judge_all, "train_dataset": dataset}
    assert (await select_model(**given, candidate_models=candidates))[0] is candidates[1]


async def test_functions_that_block_run_at_once(dataset: DatasetConfig) -> None:
    together = threading.Barrier(5, timeout=20)

    def solve_blocking(task: dict[str, Any], model: Candidate) -> WorkflowOutput:
        together.wait()
        return WorkflowOutput(response=task["a"])

    given = {"workflow_func": solve_blocking, "judge_func": judge, "train_dataset": dataset, "max_threads": 5}
    candidates = [Candidate("a", 0), Candidate("b", 0)]
    assert (await select_model(**given, candidate_models=candidates))[0] is candidates[0]
