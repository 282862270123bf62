"""Evaluation results made by hand."""

from collections.abc import Callable

import pytest

from rft_platform.evaluation.metrics import PassRate
from rft_platform.evaluation.results import EvaluationResult, Transcript, tasks_digest

CONVERSATION = [{"role": "user", "content": "12+7="}, {"role": "assistant", "content": "19"}]


def _result(
    sampled: float, version: int = 8, *, tasks: tuple[str, ...] = ("a", "b"), **changes: object
) -> EvaluationResult:
    values: dict[str, object] = {
        "round": version // 8,
        "policy_version": version,
        "tasks": len(tasks),
        "tasks_digest": tasks_digest(tasks),
        "sampled_n": 4,
        "temperature": 1.0,
        "seed": 0,
        "pass_threshold": 1.0,
        "measured_by": "m",
        "sampled": PassRate(sampled, sampled - 0.02, sampled + 0.02, len(tasks), 4 * len(tasks)),
        "greedy": None,
        "mean_reward": sampled,
        "failed_runs": 0,
        "completion_tokens": 1234,
        "truncated_share": 0.0,
        "seconds": 1.5,
        "metrics": {"eval/sums/reward/mean@4": sampled, "eval/sums/reward/best@2": sampled + 0.01},
        "transcripts": [Transcript("0123456789abcdef", "sampled", 1.0, CONVERSATION, "19")],
        "scores": {"sampled": {task: [float(run < round(100 * sampled)) for run in range(100)] for task in tasks}},
    }
    return EvaluationResult(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def make_result() -> Callable[..., EvaluationResult]:
    """``make_result(sampled pass rate, policy version, tasks=..., field=...)``."""
    return _result
