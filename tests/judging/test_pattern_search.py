"""Patterns of a configuration or dataset: each search ends in time, and means what it means for Python's ``re``."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rft_platform.judging.rules import patterns
from rft_platform.judging.rules.patterns import full_match, last_match, search

EXPONENTIAL = "(a|aa)+$"
LONG = "a" * 60 + "b"

_PROGRAM = """
import json, sys
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.judging.execution.compose import build_judge
from rft_platform.tasks.task import Task
from tests.judging.conftest import a_row
judge, arguments, answer = json.loads(sys.argv[1])
if judge == "tool_use":
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    def run(name, result):
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        asked = {"role": "user", "content": "?"}
        messages = [asked, said, {"role": "tool", "tool_call_id": "1", "content": result}]
        return [a_row(name, 0, None, messages=[asked], tool_calls=[call]), a_row(name, 1, "42", messages=messages)]
    rows = [*run("slow", answer), *run("quick", "fine")]
else:
    rows = [a_row("slow", 0, answer), a_row("quick", 0, "{}")]
task = Task("t", "tasks", "?", "42", {"question": "?", "answer": "42", "tool_calls": []})
print(json.dumps([run.error for run in judge_runs(rows, {"t": task}, build_judge(judge, arguments))]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("judge", "arguments", "answer"),
    [
        ("regex", {"pattern": EXPONENTIAL}, LONG),
        ("format", {"pattern": "(a|aa)+|{}"}, LONG),
        ("tool_use", {"error_pattern": EXPONENTIAL}, LONG),
        ("json_schema", {"schema": {"properties": {"x": {"pattern": EXPONENTIAL}}}}, f'{{"x": "{LONG}"}}'),
        ("json_schema", {"schema": {"patternProperties": {EXPONENTIAL: False}}}, f'{{"{LONG}": 1}}'),
        (
            "json_schema",
            {"schema": {"additionalProperties": False, "patternProperties": {EXPONENTIAL: True}}},
            f'{{"{LONG}": 1}}',
        ),
        (
            "json_schema",
            {
                "schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "properties": {"x": {"pattern": EXPONENTIAL}, "y": {"$ref": "#"}},
                }
            },
            f'{{"y": {{"x": "{LONG}"}}}}',
        ),
    ],
)
def test_an_exponential_search_fails_its_own_run_and_names_the_pattern(
    judge: str, arguments: dict[str, Any], answer: str
) -> None:
    asked = json.dumps([judge, arguments, answer])
    command = [sys.executable, "-c", _PROGRAM, asked]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    slow, quick = json.loads(done.stdout or "[1, 1]")
    assert quick is None, done.stderr
    assert "(a|aa)+" in slow and "takes more than 1 s" in slow and "rewrite it" in slow


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"x_{i}", "x_{i} x_j"),  # no fuzzy matching
        (r"a{e<=1}|b{1}", "ab b"),
        (r"\\boxed{(.*?)}", r"\boxed{42}"),
        (r"\{(\d+)\}", "{12}"),
        (r"\\{e}", "\\{e} \\"),
        (r"a{2,}b{,2}c{1}d{,}", "aaabbcdd"),
        (r"[{}]+", "}{"),
        (r"[x[:alpha:]]", "a:] x]"),  # no named sets
        (r"\N{DIGIT ONE}\d", "12"),
        (r"(?P<answer>\w+)\s(?P=answer)", "no no"),
        (r"(?x) a {e} # one", "a {e} a{e}"),
        (r"(?i)ſ|K", "K s"),
        (r"(?>a+)b|a++c", "aaac"),
        (r"^\s*$", "\n \n"),
        (r"(?m)^b$", "a\nb\n"),
        (r"(a)|b", "ab"),
    ],
)
def test_a_pattern_means_what_it_means_for_re(pattern: str, text: str) -> None:
    def spans(match: Any) -> Any:
        return None if match is None else (match.span(), match.groups(), match.groupdict())

    for flags in (0, re.DOTALL | re.IGNORECASE):
        found = list(re.finditer(pattern, text, flags))
        assert spans(last_match(pattern, text, flags)) == (spans(found[-1]) if found else None)
        assert spans(full_match(pattern, text, flags)) == spans(re.fullmatch(pattern, text, flags))
    assert spans(search(pattern, text)) == spans(re.search(pattern, text))


@pytest.mark.parametrize("pattern", ["(", r"\p{L}", "a**", "(?|a|b)", r"\L<words>"])
def test_a_pattern_that_re_refuses_is_refused(pattern: str) -> None:
    with pytest.raises(re.error):
        search(pattern, "a")


def test_a_long_pattern_is_shortened_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SEARCH_LIMIT_S", 0.01)
    with pytest.raises(patterns.PatternTimeoutError) as error:
        search(f"{EXPONENTIAL}{'z' * 500}|{EXPONENTIAL}", LONG)
    assert len(str(error.value)) < 400
