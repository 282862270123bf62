"""Evaluation through the real runner and judge, on an engine whose every answer is known beforehand."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from rft_platform.common.errors import EngineError, UserError
from rft_platform.config.schema.buffer import WeightedJudge
from rft_platform.evaluation.evaluate import evaluate
from rft_platform.evaluation.results import EvaluationResult, Transcript, choose
from rft_platform.inference.interface import Completion, EngineStatus, Generation, SamplingParams
from rft_platform.judging.execution.compose import build_judge
from rft_platform.rollout.class_style import ClassWorkflow, Experience, Workflow
from rft_platform.rollout.runner.run_rollouts import SingleTurn
from rft_platform.tasks.task import Task
from tests.rollout.fake_engine import FakeEngine

SAMPLING = SamplingParams(max_tokens=8, temperature=0.7)
TASKS = [
    Task(f"task{n}", "sums", f"{n}+1=", str(n + 1), {"question": f"{n}+1=", "answer": str(n + 1)}) for n in range(6)
]


def huge(task: dict[str, Any], response: Any) -> float:
    """A judge with a fault: its reward for right answers is out of all proportion."""
    return 1e30 if response == task["answer"] else 0.0


@dataclass
class SumEngine:
    """Adds in the token-in / token-out path. Sampled, the first of n answers is right; greedy, those of even tasks."""

    versions: list[int] = field(default_factory=lambda: [8])

    def status(self) -> EngineStatus:
        return EngineStatus("sums 1", "sums", self.versions[0], "w", "t", False, "float32", 64, 0, 0.0)

    def render(self, conversations: Sequence[list[dict[str, Any]]], tools: Any = None) -> list[list[int]]:
        return [list(messages[-1]["content"].encode()) for messages in conversations]

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[Generation]:
        version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        return [Generation(prompt, self._answers(prompt, sampling), version) for prompt in prompts]

    def _answers(self, prompt: list[int], sampling: SamplingParams) -> list[Completion]:
        left = int(bytes(prompt).decode().partition("+")[0])
        right = [left % 2 == 0] if sampling.temperature == 0 else [choice == 0 for choice in range(sampling.n)]
        texts = [str(left + 1) if is_right else "no idea" for is_right in right]
        return [Completion(list(text.encode()), [-0.1] * len(text), "stop") for text in texts]

    def decode(self, sequences: Sequence[list[int]]) -> list[str]:
        return [bytes(ids).decode() for ids in sequences]


def measure(engine: SumEngine | FakeEngine, tasks: list[Task] = TASKS, **changes: Any) -> EvaluationResult:
    settings: dict[str, Any] = {
        "workflow": SingleTurn(),
        "judge": build_judge("exact_match"),
        "sampled_n": 4,
        "greedy": True,
        "sampling": SAMPLING,
        "seed": 0,
        "round": 1,
        "measured_by": "exact_match",
    }
    return evaluate(engine, tasks, **{**settings, **changes})  # type: ignore[arg-type]


def test_sampled_and_greedy_pass_rates() -> None:
    result = measure(SumEngine())
    assert result.sampled is not None and result.greedy is not None
    assert (result.sampled.value, result.sampled.tasks, result.sampled.runs) == (0.25, 6, 24)
    assert (result.greedy.value, result.greedy.low < 0.5 < result.greedy.high) == (0.5, True)
    assert (result.mean_reward, result.policy_version, result.failed_runs) == (0.25, 8, 0)
    assert result.metrics["eval/sums/pass/mean@4"] == 0.25
    assert result.metrics["eval/sums/greedy_pass/mean@1"] == 0.5
    assert result.metrics["eval/sums/reward/best@4"] == pytest.approx(1 - 0.75**4, abs=0.03)
    assert result.scores["sampled"]["task3"] == [1.0, 0.0, 0.0, 0.0]
    assert not any("exact_match" in name for name in result.metrics)
    assert TypeAdapter(EvaluationResult).validate_python(json.loads(json.dumps(asdict(result)))) == result


def test_sampled_or_greedy_evaluation_alone() -> None:
    sampled = measure(SumEngine(), greedy=False)
    assert (sampled.greedy, set(sampled.scores)) == (None, {"sampled"})
    greedy = measure(SumEngine(), sampled_n=0)
    assert greedy.sampled is None
    assert (greedy.mean_reward, "sampled_pass" in greedy.summary()) == (0.5, False)
    with pytest.raises(UserError, match="nothing to run"):
        measure(SumEngine(), sampled_n=0, greedy=False)
    with pytest.raises(UserError, match="is empty"):
        measure(SumEngine(), [])


def test_parts_of_a_weighted_judge_are_metrics_of_their_own() -> None:
    judge = build_judge([WeightedJudge(judge="exact_match", weight=0.8), WeightedJudge(judge="numeric", weight=0.2)])
    result = measure(SumEngine(), judge=judge)
    assert result.sampled is not None
    assert result.sampled.value == 0.25
    assert result.metrics["eval/sums/exact_match/mean@4"] == 0.25
    assert result.metrics["eval/sums/numeric/mean@4"] == 0.25


@pytest.mark.parametrize(("weight", "reported"), [(1.0, None), (0.5, 0.25)])
def test_a_single_part_is_a_metric_if_it_differs_from_the_reward(weight: float, reported: float | None) -> None:
    result = measure(SumEngine(), judge=build_judge([WeightedJudge(judge="exact_match", weight=weight)]))
    assert result.metrics.get("eval/sums/exact_match/mean@4") == reported


def test_runs_that_the_judge_fails_on_are_left_out() -> None:
    def picky(task: dict[str, Any], response: str) -> float:
        return 1.0 / (response != "no idea")

    result = measure(SumEngine(), judge=build_judge(picky))
    assert result.sampled is not None
    assert (result.sampled.value, result.sampled.runs, result.failed_runs) == (1.0, 6, 18 + 3)


def test_weights_that_change_during_an_evaluation_invalidate_it() -> None:
    with pytest.raises(EngineError, match=r"policy versions 8, 16.*evaluate again"):
        measure(SumEngine([8, 16]))


class Warm(Workflow):
    """Its first call sets a temperature; its second leaves it to the run."""

    async def run_async(self) -> list[Experience]:
        messages = [{"role": "user", "content": str(self.task.task_desc)}]
        options: list[dict[str, float]] = [{"temperature": 0.4}, {}]
        answers = [answer for given in options for answer in await self.model.chat_async(messages, **given)]
        answers[-1].reward = 1.0
        return answers


def test_greedy_runs_whose_calls_set_a_temperature_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    measure(SumEngine())
    assert not caplog.records
    engine = FakeEngine()
    engine.serve()
    try:
        result = measure(engine, workflow=ClassWorkflow(Warm), judge=None, sampled_n=1)
    finally:
        engine.shutdown()
    assert result.greedy is not None
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("taskset sums: 6 of 12 answers of its greedy runs were sampled at temperature 0.4")


def test_transcripts_show_failures_and_successes() -> None:
    def runs(*rewards: float) -> list[Transcript]:
        return [Transcript(f"t{index}", "sampled", reward, []) for index, reward in enumerate(rewards)]

    assert [t.reward for t in choose(runs(1, 1, 1, 0, 0, 0), 4, 1.0)] == [0, 0, 1, 1]
    assert [t.reward for t in choose(runs(1, 1, 1, 0), 4, 1.0)] == [0, 1, 1, 1]
    assert [t.reward for t in choose(runs(0, 0, 0, 1), 4, 1.0)] == [0, 0, 0, 1]
    assert choose(runs(0, 1) * 3, 4, 1.0) == runs(0, 1)
    kept = measure(SumEngine(), transcripts=2).transcripts
    assert [(t.messages[0]["content"], t.messages[-1]["content"], t.expected) for t in kept] == [
        ("0+1=", "1", "1"), ("1+1=", "2", "2"),
    ]  # fmt: skip


def test_reports_quote_no_imported_task() -> None:
    first, *others = TASKS
    imported = replace(first, raw={**first.raw, "imported_from": [{"id": "t", "format": "otel"}]})
    result = measure(SumEngine(), tasks=[imported, *others], transcripts=len(TASKS))
    assert {each.task_id for each in result.transcripts} == {task.task_id for task in others}


def test_a_reward_beyond_the_bound_never_passes() -> None:
    result = measure(SumEngine(), judge=build_judge(huge))
    assert result.sampled is not None
    assert (result.sampled.value, result.mean_reward) == (0.0, 0.0)
    assert result.failed_runs == 6 + 3  # sampled and greedy ones that were right
