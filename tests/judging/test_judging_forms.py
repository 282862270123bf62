"""The rules on form, tools and cost, on cases where they must and must not give a reward."""

from dataclasses import replace
from typing import Any

import pytest

from rft_platform.common.errors import UserCodeError
from rft_platform.experience.responses import encode_response
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.judging.types import RunJudgement
from rft_platform.tasks.task import Task

from .conftest import a_row

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def judged(rows: list[Any], judge: str, columns: dict[str, Any] | None = None, **args: Any) -> RunJudgement:
    task = Task("t", "tasks", "?", "42", {"question": "?", "answer": "42", **(columns or {})})
    return judge_runs(rows, {"t": task}, build_judge(judge, args))[0]


@pytest.mark.parametrize(
    ("answer", "pattern", "reward"),
    [
        ("<answer>41</answer> no, <answer> 42 </answer>", r"<answer>(.*?)</answer>", 1.0),
        ("<answer>42</answer> no, <answer>41</answer>", r"<answer>(.*?)</answer>", 0.0),
        ("42", r"<answer>(.*?)</answer>", 0.0),
        ("a 7, b 42", r"(\w) (?P<answer>\d+)", 1.0),
        ("it is 42", r"\d+", 1.0),
        ("<answer>4\n2</answer>", r"<answer>(.*?)</answer>", 0.0),
    ],
)
def test_regex(answer: str, pattern: str, reward: float) -> None:
    assert judged([a_row("r", 0, answer)], "regex", pattern=pattern).reward == reward


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"n": 1}', 1.0),
        ('Here:\n```json\n{"n": 1}\n```', 1.0),
        ('{"n": "1"}', 0.0),
        ('{"n": 1, "m": 2}', 0.0),
        ("n: 1", 0.0),
        ("[" * 100_000, 0.0),
        ('Inline: ```json\n{"n": 1}\n```, or `n`: 1', 1.0),
        ("", 0.0),
    ],
)
def test_json_schema(answer: str, reward: float) -> None:
    rows = [a_row("r", 0, answer)]
    assert judged(rows, "json_schema", schema=SCHEMA).reward == reward
    assert judged(rows, "json_schema", {"form": SCHEMA}, schema_key="form").reward == reward


@pytest.mark.parametrize(
    ("response", "is_data"),
    [
        ([1, 2], True),
        ([], True),
        ([{"n": 1}, {"n": 2}], True),
        ([{"type": "cat", "n": 1}], True),
        ({"content": "about cats"}, True),
        ({"role": "admin", "n": 1}, True),
        ({"role": "assistant", "content": '"text"'}, False),
        ([{"role": "assistant", "content": '"text"'}], False),
        ([{"type": "text", "text": '"text"'}], False),
        ([{"type": "text", "text": ""}, {"type": "text", "text": '"text"'}], False),
    ],
)
def test_a_json_schema_of_data_that_a_workflow_returns(response: Any, is_data: bool) -> None:
    row = replace(a_row("r", 0, "done"), run_output=encode_response(response))
    assert judged([row], "json_schema", schema={"type": ["array", "object"]}).reward == float(is_data)
    assert judged([row], "json_schema", schema={"const": "text"}).reward == float(not is_data)


def test_a_schema_that_is_none_is_the_datasets_error_not_the_models() -> None:
    with pytest.raises(UserCodeError, match="is not a JSON schema"):
        judged([a_row("r", 0, "1")], "json_schema", schema={"type": "number-like"})
    with pytest.raises(UserCodeError, match="give one of schema and schema_key"):
        judged([a_row("r", 0, "1")], "json_schema")


@pytest.mark.parametrize(
    ("document", "reward"),
    [
        ('{"x1": 1, "n": 2}', 1.0),
        ('{"x1": "1", "n": 2}', 0.0),
        ('{"y": 1}', 0.0),
        ('{"next": {"x1": 1}}', 1.0),
        ('{"next": {"x1": "1"}}', 0.0),
        ('{"word": "abc"}', 1.0),
        ('{"word": "aBc"}', 0.0),
        ("[1]", 1.0),
    ],
)
def test_patterns_of_a_json_schema(document: str, reward: float) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}, "word": {"pattern": "^[a-z]+$"}},
        "patternProperties": {r"^x\d": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert judged([a_row("r", 0, document)], "json_schema", schema=schema).reward == reward


def test_a_json_schema_whose_patterns_cannot_be_bounded_is_refused() -> None:
    schema = {"patternProperties": {"a": True}, "unevaluatedProperties": False}
    with pytest.raises(UserCodeError, match="both patternProperties and unevaluatedProperties"):
        judged([a_row("r", 0, "{}")], "json_schema", schema=schema)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<think>so</think>\n<answer>42</answer>", 1.0),
        ("<answer>42</answer><think>so</think>", 0.0),
        ("<think>so</think><answer>42</answer> Bye", 0.0),
        ("<think> </think><answer>42</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>42</answer>", 0.0),
        ("<think>so</think><answer>42", 0.0),
        ("<think>say <answer> first</think><answer>42</answer>", 0.0),
    ],
)
def test_tags(answer: str, reward: float) -> None:
    assert judged([a_row("r", 0, answer)], "tags").reward == reward


def test_tags_with_text_around_them_and_thoughts_that_were_parsed_out() -> None:
    assert judged([a_row("r", 0, "So: <answer>4</answer> Bye")], "tags", tags=["answer"], alone=False).reward == 1.0
    assert judged([a_row("r", 0, "<answer>4</answer>", reasoning_content="so")], "tags").reward == 1.0
    assert judged([a_row("r", 0, "<answer>4</answer>")], "tags").reward == 0.0


def test_penalties() -> None:
    rows = [a_row("r", step, "x", tokens=10) for step in range(4)]
    assert judged(rows, "steps_penalty").reward == pytest.approx(-0.4)
    assert judged(rows, "steps_penalty", free_steps=3).reward == pytest.approx(-0.1)
    assert judged(rows, "steps_penalty", per_step=-1.0, lowest=-2.0).reward == -2.0
    choices = [replace(rows[0], row_id=f"r-{choice}") for choice in range(3)]
    assert judged([*choices, *rows[1:]], "steps_penalty", free_steps=3).reward == pytest.approx(-0.1)
    assert judged(rows, "length_penalty", max_tokens=40).reward == 0.0
    assert judged(rows, "length_penalty", max_tokens=39).reward == -1.0
    assert judged(rows, "length_penalty", max_tokens=30, margin_tokens=20).reward == -0.5
    with pytest.raises(UserCodeError, match="a penalty is 0 or negative"):
        judged(rows, "steps_penalty", per_step=0.1)


SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["query"],
}
TOOLS = [
    {"type": "function", "function": {"name": "search", "parameters": SEARCH}},
    {"type": "function", "function": {"name": "now"}},
]


def tool_run(*made: tuple[str, str, str | None]) -> list[Any]:
    """A run that made these calls (name, arguments, result) in its first step and then ended."""
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments, _) in enumerate(made)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"c{n}", "content": result}
        for n, (_, _, result) in enumerate(made)
        if result is not None
    ]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    return [
        a_row("r", 0, None, messages=[{"role": "user", "content": "?"}], tools=TOOLS, tool_calls=calls),
        a_row("r", 1, "end", messages=[{"role": "user", "content": "?"}, said, *results], tools=TOOLS),
    ]


WANTED = [{"name": "search", "arguments": {"query": "mail", "limit": 2}}, {"tool": "now"}]
RIGHT = ("search", '{"limit": 2, "query": "mail"}', "3 hits")


@pytest.mark.parametrize(
    ("wanted", "made", "shares", "reward"),
    [
        (WANTED, [RIGHT, ("now", "{}", "noon")], (1, 1, 1, 0, 0), 2.5),
        (WANTED, [("search", '{"query": "post"}', "0 hits"), ("now", "", "noon")], (1, 0.5, 1, 0, 0), 2.25),
        (WANTED, [RIGHT], (0.5, 0.5, 1, 0, 0), 1.75),
        (WANTED, [("search", '{"query": "mail", "limit": 2}', "Error: no access")], (0.5, 0.5, 0, 0, 0), 0.75),
        (WANTED, [("delete", "{}", "gone")], (0, 0, 1, 1, 1), -1.0),
        (WANTED, [("search", '{"limit": 2}', "hits"), ("search", "{oops", None)], (0.5, 0, 0.5, 1, 0.5), -1.0),
        (WANTED, [RIGHT, RIGHT, RIGHT, ("now", "{}", "noon")], (1, 1, 1, 0, 0.5), 2.5),
        (WANTED, [], (0, 0, 0, 0, 0), 0.0),
        ([], [], (1, 1, 1, 0, 0), 2.5),
        ([], [("now", "{}", "noon")], (0, 0, 0, 0, 1), 0.0),
        ('[{"function": {"name": "now", "arguments": "{}"}}]', [("now", "{}", "noon")], (1, 1, 1, 0, 0), 2.5),
    ],
)
def test_tool_use(wanted: Any, made: list[Any], shares: tuple[float, ...], reward: float) -> None:
    run = judged(tool_run(*made), "tool_use", {"tool_calls": wanted})
    names = ("correct_tool", "correct_args", "tool_success", "invalid_tool", "unneeded_tool")
    assert tuple(run.parts[f"tool_use/{name}"] for name in names) == shares
    assert run.reward == pytest.approx(reward)


def test_tools_in_order_and_with_other_weights() -> None:
    made = tool_run(("now", "{}", "noon"), RIGHT)
    assert judged(made, "tool_use", {"tool_calls": WANTED}).reward == 2.5
    ordered = judged(made, "tool_use", {"tool_calls": WANTED}, ordered=True)
    assert (ordered.parts["tool_use/correct_tool"], ordered.parts["tool_use/correct_args"]) == (0.5, 0.5)
    assert (
        judged(tool_run(RIGHT, RIGHT), "tool_use", {"wants": WANTED[:1]}, calls_key="wants", unneeded_tool=-1.0).reward
        == 2.0
    )
    with pytest.raises(UserCodeError, match="no column 'tool_calls' with the expected tool calls"):
        judged(made, "tool_use")
