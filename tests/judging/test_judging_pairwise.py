"""Judges of whole groups: pairs asked in both orders, ranks, the mixture with other judges, and pairs to learn from."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import JudgeUnavailableError, UserCodeError, UserError
from rft_platform.config.schema.buffer import WeightedJudge
from rft_platform.experience.record import RolloutRow
from rft_platform.judging.execution.compose import JudgeSpec, build_judge
from rft_platform.judging.execution.judge_rollouts import judge_rollouts, judge_runs
from rft_platform.judging.judge_context import JudgeState
from rft_platform.judging.preferences import preference_pairs, write_pairs
from rft_platform.judging.types import JudgeOutput
from rft_platform.tasks.offline_dataset import Columns, load_pairs

from .conftest import TASKS, JudgeServer, a_row, run_rows

CRITERIA = {"help": "how much it helps"}


def longer(prompt: str) -> str:
    """The longer answer wins; of two of one length the first, which is a liking for the place."""
    first, second = (re.findall(rf"<answer_{x}>\n(.*?)\n</answer_{x}>", prompt, re.DOTALL)[0] for x in "ab")
    return f'{{"reason": "length", "better": "{"B" if len(second) > len(first) else "A"}"}}'


def pairwise(endpoint: JudgeServer, state: JudgeState, **args: Any) -> JudgeSpec:
    endpoint.say = longer
    return replace(build_judge("pairwise", {"model": endpoint.model, "criteria": CRITERIA, **args}), state=state)


def test_the_reward_is_the_win_rate_over_both_orders(endpoint: JudgeServer, state: JudgeState) -> None:
    runs = judge_runs(run_rows(["a", "aaa", "bb", "cc"]), TASKS, pairwise(endpoint, state))
    assert [run.reward for run in runs] == [0.0, 1.0, 0.5, 0.5]  # bb and cc: the first place won, in both orders
    assert endpoint.calls == 4 * 3
    assert runs[1].parts == {"pairwise": 1.0, "pairwise/compared": 3.0, "pairwise/consistent": 1.0}
    assert runs[2].parts["pairwise/consistent"] == pytest.approx(2 / 3)


def test_against_a_pivot(endpoint: JudgeServer, state: JudgeState) -> None:
    runs = judge_runs(run_rows(["aa", "a", "aaa", "aaaa"]), TASKS, pairwise(endpoint, state, pivot=0))
    assert [run.reward for run in runs] == [pytest.approx(1 / 3), 0.0, 1.0, 1.0]
    assert endpoint.calls == 2 * 3


def test_groups_are_compared_separately_and_equal_answers_need_no_call(
    endpoint: JudgeServer, state: JudgeState
) -> None:
    rows = [*run_rows(["a", "aa"], group="g1"), *run_rows(["same", " same"], group="g2"), *run_rows(["x"], group="g3")]
    runs = judge_runs(rows, TASKS, pairwise(endpoint, state))
    assert [run.reward for run in runs] == [0.0, 1.0, 0.5, 0.5, 0.5]
    assert endpoint.calls == 2


def test_models_rules_and_groups_in_one_judge(endpoint: JudgeServer, state: JudgeState) -> None:
    endpoint.say = lambda prompt: longer(prompt) if "answer_a" in prompt else '{"scores": {"help": 5}}'
    model = {"model": endpoint.model, "criteria": CRITERIA}
    spec = build_judge(
        [
            WeightedJudge(judge="exact_match"),
            WeightedJudge(judge="llm", weight=0.5, args=model),
            WeightedJudge(judge="pairwise", weight=0.25, args=model),
            WeightedJudge(judge="steps_penalty", weight=1.0, args={"per_step": -0.1}),
            WeightedJudge(judge=f"{__name__}:best_of_group", weight=2.0),
        ]
    )
    rows = run_rows(["a", "bbb"])
    judged = judge_rollouts(rows, TASKS, replace(spec, state=state), advantage_fn="grpo")
    best = f"{__name__}:best_of_group"
    assert judged.rows[0].reward == pytest.approx(1.0 + 0.5 + 0.0 - 0.1 + 0.0)
    assert judged.rows[1].reward == pytest.approx(0.0 + 0.5 + 0.25 - 0.1 + 2.0)
    assert judged.rows[1].reward_parts == {
        "exact_match": 0.0, "llm": 1.0, "llm/help": 5.0, "pairwise": 1.0, "pairwise/compared": 1.0,
        "pairwise/consistent": 1.0, "steps_penalty": -0.1, best: 1.0, f"{best}/rank": 0.0,
    }  # fmt: skip
    assert {row.judge_version for row in judged.rows} == {spec.version}


def best_of_group(task: dict[str, Any], responses: list[Any], runs: Any, logger: Any) -> list[JudgeOutput]:
    """A user's judge of a group: the last in the alphabet is best."""
    order = sorted(responses, reverse=True)
    return [JudgeOutput(float(r == order[0]), {"rank": float(order.index(r))}) for r in responses]


async def miscounts(task: dict[str, Any], responses: list[Any]) -> list[float]:
    return [1.0] * (len(responses) + 1) if "x" in responses else [float("nan"), *([1.0] * (len(responses) - 1))]


def test_a_judge_of_groups_that_fails_on_one() -> None:
    rows = [*run_rows(["x", "y"], group="g1"), *run_rows(["a", "b"], group="g2")]
    runs = judge_runs(rows, TASKS, build_judge(miscounts))
    assert [run.error is None for run in runs] == [False, False, False, True]
    assert "returned 3 rewards for the 2 runs of a group" in str(runs[0].error)
    with pytest.raises(UserCodeError, match="failed on all 2 runs"):
        judge_runs(rows[:2], TASKS, build_judge(miscounts))


def test_the_parameters_of_a_judge_of_groups_are_checked() -> None:
    def wrong(task: Any, responses: Any, response: Any) -> list[float]:
        return []

    with pytest.raises(UserError, match=r"Group judge function.*disallowed parameters: \['response'\].*'runs'"):
        build_judge(wrong)


def test_shorter_runs_of_a_group_rank_higher() -> None:
    rows = [a_row(f"r{n}", 0, "a", tokens=tokens) for n, tokens in enumerate([5, 1, 5, 9])]
    assert [run.reward for run in judge_runs(rows, TASKS, build_judge("shortest"))] == [0.5, 1.0, 0.5, 0.0]
    assert judge_runs(rows[:1], TASKS, build_judge("shortest"))[0].reward == 0.5


def test_a_comparison_that_is_not_answered_ends_the_judging(endpoint: JudgeServer, state: JudgeState) -> None:
    spec = pairwise(endpoint, state, retries=0)
    endpoint.failures = [503] * 9
    with pytest.raises(JudgeUnavailableError):
        judge_runs(run_rows(["a", "aa", "aaa"]), TASKS, spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_judged_groups_become_a_dataset_for_dpo(
    endpoint: JudgeServer, state: JudgeState, tmp_path: Path, name: str
) -> None:
    rows = [*run_rows(["a", "aaa", "aa"], group="g1"), *run_rows(["b", "b"], group="g2")]
    judged = judge_rollouts(rows, TASKS, pairwise(endpoint, state), advantage_fn=None)
    found = preference_pairs(rows, judged.rows)
    assert (found.groups, found.without_pair) == (2, 1)
    write_pairs(tmp_path / name, found.rows)
    columns = Columns(prompt_type="chatpair" if name.endswith("parquet") else None)
    (row,) = load_pairs(str(tmp_path / name), columns).rows
    assert row["prompt"] == [{"role": "user", "content": "Say a."}]
    assert (row["chosen"][-1]["content"], row["rejected"][-1]["content"]) == ("aaa", "a")
    everything = preference_pairs(rows, judged.rows, which="all")
    assert [(row["chosen_run"], row["rejected_run"]) for row in everything.rows] == [
        ("g1-1", "g1-2"), ("g1-1", "g1-0"), ("g1-2", "g1-0"),
    ]  # fmt: skip
    assert len(preference_pairs(rows, judged.rows, which="all", least_margin=0.6).rows) == 1


def test_runs_of_several_calls_pair_where_they_first_differ(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "2+2?"}]
    function = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    tools = [{"type": "function", "function": {"name": "add"}}]

    def run(name: str, result: str, answer: str) -> list[RolloutRow]:
        call = {"id": f"call-{name}", "type": "function", "function": function}  # an id of its own in every run
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        after = [*asked, said, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        return [
            a_row(name, 0, None, messages=asked, tools=tools, tool_calls=[call]),
            a_row(name, 1, answer, messages=after, tools=tools),
        ]

    rows = [*run("r0", "4", "4"), *run("r1", "4", "6"), *run("r2", "5", "5"), a_row("r3", 0, "9", messages=asked)]
    judged = judge_rollouts(rows, TASKS, build_judge(distance_to_ten), advantage_fn=None).rows
    found = preference_pairs(rows, judged, which="all").rows
    assert [(pair["chosen_run"], pair["rejected_run"], pair["step"]) for pair in found] == [
        ("r0", "r1", 1), ("r0", "r3", 0), ("r2", "r3", 0), ("r1", "r3", 0),  # r2 was told another sum than r0 and r1
    ]  # fmt: skip
    assert [message["role"] for message in found[0]["prompt"]] == ["user", "assistant", "tool"]
    write_pairs(tmp_path / "pairs.jsonl", found)
    assert len(load_pairs(str(tmp_path / "pairs.jsonl"), Columns()).rows) == 4


@pytest.mark.parametrize(
    ("answers", "margin", "pairs"),
    [
        (("10", "9"), 1.0, 1),
        (("10", "9"), 1.1, 0),
        (("1.1", "1.0"), 0.1, 1),  # the difference of the rewards is 0.09999999999999964
        (("9", "9"), 0.0, 0),
    ],
)
def test_a_pair_differs_by_the_margin_or_more(answers: tuple[str, str], margin: float, pairs: int) -> None:
    rows = [a_row(f"r{run}", 0, answer) for run, answer in enumerate(answers)]
    judged = judge_rollouts(rows, TASKS, build_judge(distance_to_ten), advantage_fn=None).rows
    assert len(preference_pairs(rows, judged, least_margin=margin).rows) == pairs


def test_a_file_without_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no pair to write: .* Give other rounds, --all-pairs or a smaller --margin"):
        write_pairs(tmp_path / "pairs.jsonl", [])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_of_pairs_keeps_tools_that_only_some_pairs_have(tmp_path: Path, suffix: str) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [
        a_row(f"{group}-{n}", 0, str(n), tools=given, group=group)
        for group, given in (("g1", None), ("g2", tools))
        for n in (1, 2)
    ]
    judged = judge_rollouts(rows, TASKS, build_judge(distance_to_ten), advantage_fn=None).rows
    file = tmp_path / f"pairs.{suffix}"
    write_pairs(file, preference_pairs(rows, judged).rows)
    columns = Columns(prompt_type="chatpair" if suffix == "parquet" else None)
    assert [row.get("tools") for row in load_pairs(str(file), columns).rows] == [None, tools]


def distance_to_ten(task: Any, response: Any) -> float:
    return 10.0 - float(response)
