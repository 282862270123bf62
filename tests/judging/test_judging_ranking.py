"""The judge ``ranking``: one call for each group, scores relative to each other, and the advantages."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.config.schema.buffer import MODEL_JUDGES
from rft_platform.judging.execution import compose
from rft_platform.judging.execution.compose import JudgeSpec, build_judge
from rft_platform.judging.execution.judge_rollouts import judge_rollouts, judge_runs
from rft_platform.judging.judge_context import JudgeState

from .conftest import TASKS, JudgeServer, run_rows

CRITERIA = {"help": "how much it helps"}


def by_length(prompt: str) -> str:
    """A tenth for each character of an answer."""
    answers = re.findall(r"<(answer_\d+)>\n(.*?)\n</answer_\d+>", prompt, re.DOTALL)
    return "Let me see.\n" + json.dumps(
        {"reasons": "length", "scores": {name: len(text) / 10 for name, text in answers}}
    )


def ranking(endpoint: JudgeServer, state: JudgeState, **args: Any) -> JudgeSpec:
    endpoint.say = by_length
    return replace(build_judge("ranking", {"model": endpoint.model, "criteria": CRITERIA, **args}), state=state)


def test_one_call_scores_all_runs_of_a_group_and_advantages_follow(endpoint: JudgeServer, state: JudgeState) -> None:
    rows = [*run_rows(["a", "aaa", "bb", " a "], group="g1"), *run_rows(["aaaaa", "b"], group="g2")]
    judged = judge_rollouts(rows, TASKS, ranking(endpoint, state), advantage_fn="grpo").rows
    assert [row.reward for row in judged] == pytest.approx([0.1, 0.3, 0.2, 0.1, 0.5, 0.1])
    assert endpoint.calls == 2, "one call a group; equal answers are shown once"
    assert judged[1].reward_parts == {"ranking": pytest.approx(0.3), "ranking/compared": 3.0}
    best, worst = max(judged[:4], key=lambda row: row.advantage), min(judged[:4], key=lambda row: row.advantage)
    assert (best.row_id, worst.reward) == (
        judged[1].row_id,
        pytest.approx(0.1),
    ) and best.advantage > 0 > worst.advantage


def test_the_order_of_the_answers_does_not_depend_on_the_order_of_the_runs(
    endpoint: JudgeServer, state: JudgeState
) -> None:
    spec = ranking(endpoint, state)
    judge_runs(run_rows(["a", "bb", "ccc", "dddd"]), TASKS, spec)
    runs = judge_runs(run_rows(["dddd", "ccc", "bb", "a"]), TASKS, spec)
    assert [run.reward for run in runs] == [0.4, 0.3, 0.2, 0.1]
    assert endpoint.calls == 1, "the same prompt, whose answer is stored"


def test_equal_answers_and_a_single_run_are_not_asked_about(endpoint: JudgeServer, state: JudgeState) -> None:
    rows = [*run_rows(["same", " same"], group="g1"), *run_rows(["x"], group="g2")]
    assert [run.reward for run in judge_runs(rows, TASKS, ranking(endpoint, state))] == [0.5, 0.5, 0.5]
    assert endpoint.calls == 0


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"scores": {"answer_1": 0.5}}', "expected answer_1, answer_2, got answer_1."),
        ('{"scores": {"answer_1": 0.5, "answer_2": 1.5}}', "answer_2: Input should be less than or equal to 1"),
        (
            '{"scores": {"answer_1": 0.5, "answer_2": 0.1, "answer_3": 1}}',
            "got answer_1, answer_2, answer_3",
        ),
        ('{"scores": [0.5, 0.1]}', "scores: Input should be"),
    ],
)
def test_scores_that_are_missing_or_off_the_scale_are_sent_back(
    endpoint: JudgeServer, state: JudgeState, said: str, told: str
) -> None:
    spec = ranking(endpoint, state, retries=1, backoff_s=0.0, on_invalid="drop")
    endpoint.say = lambda prompt: said
    with pytest.raises(UserCodeError, match="failed on all 2 runs"):
        judge_runs(run_rows(["a", "bb"]), TASKS, spec)
    assert told in json.dumps(endpoint.requests[1]["messages"])


def test_a_template_without_the_answers_is_refused() -> None:
    with pytest.raises(UserError, match=r"template has no \{answers\}"):
        build_judge(
            "ranking", {"model": {"base_url": "http://h/v1", "model": "m"}, "criteria": CRITERIA, "template": "x"}
        )


def test_the_schema_names_the_judges_that_ask_a_model() -> None:
    assert tuple(compose.MODEL_JUDGES) == MODEL_JUDGES
