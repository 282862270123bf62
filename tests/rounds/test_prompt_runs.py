"""Runs of a prompt search: what failed runs count, which errors end the search, and what is kept if MLflow fails."""

from pathlib import Path

import pytest

from rft_platform.common.errors import EngineError, RegistryError, UserCodeError
from rft_platform.evaluation.gate import GateDecision
from rft_platform.evaluation.prompt_search import FoundPrompt, FoundPrompts
from rft_platform.inference.interface import Completion, SamplingParams
from rft_platform.rounds.prompt_search import _Measuring, _prepared, _Search, _stored
from rft_platform.rounds.reporting.prompt_report import PromptResult, read_prompt_result
from tests.rollout.fake_engine import FakeEngine, decode, encode, logprobs_of
from tests.rounds.test_prompt_settings import MODEL, project

JUDGE = """
def judge(task, response):
    if "fail" in response or ("odd" in response and int(task["answer"]) % 2):
        raise RuntimeError("no reward")
    return -0.5 * int(task["answer"]) if "cost" in response else 0.25
"""


class Echo(FakeEngine):
    """Answers with what it reads, the system prompt included."""

    def _complete(self, prompt: list[int], sampling: SamplingParams) -> list[Completion]:
        ids = encode(decode(prompt))
        return [Completion(ids, logprobs_of(ids), "stop")] * sampling.n


@pytest.fixture
def search(tmp_path: Path) -> tuple[_Measuring, _Search]:
    (tmp_path / "judge.py").write_text(JUDGE)
    rows = [{"question": f"{number}+0=", "answer": str(number)} for number in range(1, 5)]
    given = {"reflection": {"model": MODEL}, "tasks": 4}
    opened = project(tmp_path, given, rows, judge=f"{tmp_path}/judge.py:judge")
    return _Measuring(opened, Echo(), {}, {}, 500), _prepared(opened)


def rewards(search: tuple[_Measuring, _Search], prompt: str) -> dict[str, float]:
    measuring, searched = search
    tasks = searched.dataset.tasks
    made = measuring.runs(searched, prompt, tasks)
    return {task.prompt: run.reward for task, run in sorted(zip(tasks, made, strict=True), key=lambda x: x[0].prompt)}


def test_a_failed_run_counts_0_but_not_more_than_the_lowest_reward(search: tuple[_Measuring, _Search]) -> None:
    assert rewards(search, "odd") == {"1+0=": 0.0, "2+0=": 0.25, "3+0=": 0.0, "4+0=": 0.25}
    assert rewards(search, "odd cost") == {"1+0=": -2.0, "2+0=": -1.0, "3+0=": -2.0, "4+0=": -2.0}


def test_a_prompt_with_which_every_run_fails_does_not_end_the_search(search: tuple[_Measuring, _Search]) -> None:
    with pytest.raises(UserCodeError, match="the judge failed on all 4 runs"):
        rewards(search, "fail")
    rewards(search, "cost")
    assert set(rewards(search, "fail").values()) == {-2.0}
    assert search[0].runs(search[1], "fail", search[1].dataset.tasks[:1])[0].record["failed"]


def test_a_lost_engine_ends_the_search(search: tuple[_Measuring, _Search]) -> None:
    rewards(search, "cost")
    search[0].engine.dead = True  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="does not answer"):
        rewards(search, "cost")


def test_the_result_is_kept_if_mlflow_fails(search: tuple[_Measuring, _Search]) -> None:
    class Down:
        model_name = "demo"

        def training_run(self, name: str) -> None:
            raise RegistryError("MLflow does not answer")

    measuring, _ = search
    points = measuring.held_out(FoundPrompts((FoundPrompt("cost", -1.0, 4), FoundPrompt("gain", 0.25, 12)), 2, 20))
    result = PromptResult(7, points, 2, 20, 4, GateDecision(True, "better"), {}, 1.5)
    with pytest.raises(RegistryError, match="does not answer"):
        _stored(measuring.project, Down(), result)  # type: ignore[arg-type]
    assert read_prompt_result(measuring.project.home) == result
    assert "## The best prompt (not registered)" in (measuring.project.home.prompts / "report.md").read_text()
