"""Patterns that read texts of models and other strangers take linear time, also on long runs of any character."""

import ast
import importlib
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import rft_platform
from rft_platform.common.redaction import redact
from rft_platform.judging.inert_text import make_inert
from rft_platform.judging.llm.asking import InvalidAnswerError, last_object
from rft_platform.judging.rules.code import extract_code
from rft_platform.judging.rules.mathematics import final_answer, final_number
from rft_platform.openai_api.parsers import OutputParser

ROOT = Path(rft_platform.__file__).parent
SIZE = 40_000  # characters
SOON_S, LATE_S = 0.3, 3.0  # of processor time: what certainly is linear, and when a call is ended
MOST_GROWTH = 3.0  # of the time when a text is twice as long: 2 if linear, 4 if quadratic

#: Patterns that are applied with ``fullmatch`` or ``match`` only.
ANCHORED = {
    "judging.rules.mathematics._BRACKETED",
    "tasks.sources._HUB_NAME",
    "tasks.readers._PART",
    "web_guard.token._SHAPE",
    "resources.names._PART",
    "experience.file_names._KEY",
    "experience.file_names._BATCHES",
    "experience.notes._NOTE",
    "tuner.result._NAME",
    "model_registry.models.MODEL_URI",
    "inference.vllm_engine.adapters._TENSOR",
}
#: Patterns that may take longer, and why.
EXEMPT = {
    "judging.rules.patterns._NOTATION": "reads patterns of the configuration",
    "common.files._TEMPORARY": "reads names of files, at most 255 bytes",
    "common.code_snapshot._REFERENCE": "reads names of functions in the configuration",
    "config.checks.settings._QUERY_SECRET": "reads the configuration",
    "config.load._ESCAPED": "reads the configuration",
    "config.paths._CODE": "reads the configuration",
}


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """All compiled patterns at the top level of modules, also inside collections, by module and name."""
    for file in sorted(ROOT.rglob("*.py")):
        if "re.compile(" in file.read_text("utf-8"):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            for name, value in vars(importlib.import_module(f"rft_platform.{module}")).items():
                for number, pattern in enumerate(_inside(value)):
                    yield f"{module}.{name}{f'[{number}]' if not isinstance(value, re.Pattern) else ''}", pattern


def _inside(value: Any) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _inside(part)


PATTERNS = dict(patterns())


def literals(pattern: re.Pattern[str]) -> set[str]:
    """Some texts that a pattern names: words, and marks that begin a longer part."""
    text = re.sub(r"\s+|#.*", "", pattern.pattern) if pattern.flags & re.VERBOSE else pattern.pattern
    parts = re.split(r"\\[a-zA-Z]|[][(){}|*+?^$.:=!<\\]|(?<=\w)(?=\W)", text)
    named = sorted({part for part in parts if part.strip()}, key=lambda part: (-len(part), part))[:4]
    return {*named, *(mark for mark in MARKS if mark[:2] in text)}


MARKS = ("<answer>", "```", "\\boxed{", "<think>", "://", "eyJ", "{")
FEW_UNITS = (" ", "\n", "a", "1", "[", "{", "<", "\\")
UNITS = ("\t", "`", "```", "```\n", "}", "<a>", "(", '"', "'", ",", ".", ":", "-", "=")
UNITS += (
    "1,",
    "a ",
    "1 ",
    "- ",
    ": ",
    "is ",
    "://",
    "a:",
    "eyJ-",
    "'token'",
    "\\text{",
    "\\boxed{",
    "<answer>",
    "A:\n",
)
TAGS = (
    "",
    "<answer>",
    "<think>",
    "</answer>",
    "<tool_call>",
    "```",
    "```json",
    "{",
    '{"',
    "\\boxed{",
    "$",
    "<",
    "[",
    "#### ",
)


def slow(act: Callable[[str], Any], prefixes: Iterable[str], units: Iterable[str]) -> list[tuple[str, str, float]]:
    """The texts for which a call takes long, and more than linear time: a prefix, a unit that is repeated, seconds."""
    found = []
    for prefix in prefixes:
        for unit in units:
            half, whole = (prefix + unit * (size // len(unit)) for size in (SIZE // 2, SIZE))
            if (took := _seconds(act, whole)) > SOON_S and took > MOST_GROWTH * (before := _seconds(act, half)):
                # Counted twice: on a busy machine the same work takes up to twice the processor time.
                took, before = min(took, _seconds(act, whole)), min(before, _seconds(act, half))
                if took > MOST_GROWTH * before or took > LATE_S:
                    found.append((prefix, unit, took))
    return found


class _TooLongError(BaseException):
    """The time of a call is over."""


def _seconds(act: Callable[[str], Any], text: str) -> float:
    def end(*_: Any) -> None:
        raise _TooLongError

    before, began = signal.signal(signal.SIGVTALRM, end), time.thread_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, 1.1 * LATE_S)
    try:
        act(text)
    except _TooLongError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return time.thread_time() - began


@pytest.mark.parametrize("units", [FEW_UNITS, pytest.param(UNITS, marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.parametrize("name", sorted(PATTERNS.keys() - EXEMPT.keys()))
def test_a_pattern_takes_linear_time(name: str, units: tuple[str, ...]) -> None:
    pattern = PATTERNS[name]
    named = literals(pattern)

    def search(text: str) -> None:
        if name in ANCHORED:
            pattern.fullmatch(text)
        else:
            for _ in pattern.finditer(text):
                pass

    assert slow(search, ("", *named), sorted({*units, *named})) == []


def json_object(text: str) -> None:
    with suppress(InvalidAnswerError):
        last_object(text)


def tool_calls(text: str) -> None:
    OutputParser(reasoning=True, tools=True).feed(text, last=True)


READERS: dict[str, Callable[[str], Any]] = {
    "code": extract_code,
    "mathematics": final_answer,
    "numbers": final_number,
    "tool calls": tool_calls,
    "model as judge": json_object,
    "graded text": lambda text: make_inert(text, ("answer", "question"), ("<|im_end|>",)),
    "secrets": redact,
}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_of_answers_takes_linear_time(reader: str) -> None:
    assert slow(READERS[reader], TAGS, (*FEW_UNITS, *UNITS)) == []


def test_a_list_that_looks_like_thousands_takes_linear_time() -> None:
    assert slow(lambda text: final_number(f"{text}1"), ["#### "], ["111 "]) == []


def test_exceptions_name_patterns_that_exist() -> None:
    assert EXEMPT.keys() | ANCHORED <= PATTERNS.keys()


def test_anchored_patterns_are_not_searched_for() -> None:
    for name in ANCHORED:
        module, _, attribute = name.rpartition(".")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
        calls = [
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == attribute
        ]
        assert set(calls) <= {"fullmatch", "match"}, name


@pytest.mark.slow
def test_a_quadratic_pattern_is_noticed() -> None:
    pattern = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
    assert slow(pattern.findall, [""], ["<answer>"]) != []
