"""Judges of an answer's text and form: equality, containment, length, a pattern, a JSON schema, a sequence of tags.

Patterns come from a configuration or dataset and search model-written text. A pattern such as ``(a|aa)+$`` takes
exponential time on some texts, and Python's ``re`` cannot be interrupted. The library ``regex`` has a time limit.
Patterns have the same meaning as in ``re``; those of a JSON schema are searched within the limit, too.
"""

import json
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any

import regex as bounded_regex  # type: ignore[import-untyped]
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from rft_platform.common.errors import UserError
from rft_platform.judging.judged_run import JudgedRun, reference_text, response_text
from rft_platform.tasks.enclosed_text import last_enclosed

SEARCH_LIMIT_S = 1.0  #: processor time of one search
_SHOWN = 120  # characters of a pattern in a message

# ``x{e}`` (fuzzy matching) and ``[[:alpha:]]`` (a named set) are notations of ``regex``; ``re`` reads them literally.
_NOTATION = re.compile(r"\\N\{[^}]*\}|\\.|\{(?:\d+(?:,\d*)?|,\d*)\}|\{|\[:", re.DOTALL)
_LITERAL = {"{": r"\{", "[:": r"[\:"}


class PatternTimeoutError(Exception):
    """A search reached its time limit; the message names the pattern."""

    def __init__(self, pattern: str) -> None:
        shown = pattern if len(pattern) <= _SHOWN else f"{pattern[:_SHOWN]}..."
        super().__init__(
            f"the pattern {shown!r} takes more than {SEARCH_LIMIT_S:g} s on a text of this run: rewrite it without "
            "alternatives or repetitions that overlap inside a repetition, such as (a|aa)+"
        )


def search(pattern: str, text: str) -> Any:
    """Return the first match, as ``re.search``. Raises ``re.error`` for an invalid pattern, or PatternTimeoutError."""
    with _limit(pattern):
        return _compiled(pattern, 0).search(text, timeout=SEARCH_LIMIT_S)


def full_match(pattern: str, text: str, flags: int) -> Any:
    """Return the match of the whole text, as ``re.fullmatch``; raises as ``search``."""
    with _limit(pattern):
        return _compiled(pattern, flags).fullmatch(text, timeout=SEARCH_LIMIT_S)


def last_match(pattern: str, text: str, flags: int) -> Any:
    """Return the last match of ``re.finditer``, or None; raises as ``search``."""
    with _limit(pattern):
        return next(iter(deque(_compiled(pattern, flags).finditer(text, timeout=SEARCH_LIMIT_S), maxlen=1)), None)


@contextmanager
def _limit(pattern: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise PatternTimeoutError(pattern) from None


@lru_cache(maxsize=256)
def _compiled(pattern: str, flags: int) -> Any:
    re.compile(pattern, flags)  # refuses syntax that only ``regex`` understands
    as_re = _NOTATION.sub(lambda found: _LITERAL.get(found[0], found[0]), pattern)
    return bounded_regex.compile(as_re, flags | bounded_regex.VERSION0)


def _valid_pattern(pattern: str) -> str:
    try:
        _compiled(pattern, re.DOTALL)
    except (re.error, bounded_regex.error, OverflowError, RecursionError) as error:
        raise PydanticCustomError("pattern", "{why}", {"why": f"no regular expression of Python: {error}"}) from error
    return pattern


#: A regular expression among a judge's arguments, which are checked when the judge is built.
Pattern = Annotated[str, AfterValidator(_valid_pattern)]


def allows(schema: str | dict[str, Any] | bool, value: Any) -> bool:
    """Whether a JSON schema (an object, or its text) allows a JSON value.

    Raises ValueError for an invalid schema, PatternTimeoutError if one of its patterns takes too long.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
    return bool(_validator(text).is_valid(value))


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    try:
        from jsonschema import SchemaError  # type: ignore[import-untyped]
        from jsonschema.validators import extend, validator_for  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(
            "checking against a JSON schema needs the package jsonschema: pip install jsonschema"
        ) from error
    try:
        schema = json.loads(text)
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ValueError(f"{text[:80]!r} is not a JSON schema: {str(error).splitlines()[0]}") from error
    if isinstance(schema, dict):
        schema.pop("$schema", None)  # else a reference to the root would select the standard validator again
    if '"patternProperties"' not in text:
        return extend(kind, {"pattern": _pattern})(schema)
    if '"unevaluatedProperties"' in text:
        raise ValueError(
            f"the JSON schema {text[:80]!r} has both patternProperties and unevaluatedProperties, which cannot be "
            "checked within a time limit: use additionalProperties"
        )
    own = {"patternProperties": _pattern_properties, "additionalProperties": _additional_properties}
    return extend(kind, {"pattern": _pattern, **own})(schema)


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Keyword ``pattern``."""
    if validator.is_type(value, "string") and not search(pattern, value):
        yield _error(f"{value!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: dict[str, Any], value: Any, schema: Any) -> Iterator[Any]:
    """Keyword ``patternProperties``."""
    if validator.is_type(value, "object"):
        for pattern, own in patterns.items():
            for name in filter(lambda name: search(pattern, name), value):
                yield from validator.descend(value[name], own, path=name, schema_path=pattern)


def _additional_properties(validator: Any, own: Any, value: Any, schema: Any) -> Iterator[Any]:
    """Keyword ``additionalProperties``: for names that neither ``properties`` nor ``patternProperties`` cover."""
    if validator.is_type(value, "object"):
        patterns = schema.get("patternProperties", {})
        for name in value.keys() - schema.get("properties", {}).keys():
            if not any(search(pattern, name) for pattern in patterns):
                yield from validator.descend(value[name], own, path=name)


def _error(message: str) -> Any:
    from jsonschema import ValidationError

    return ValidationError(message)


def exact_match(task: dict[str, Any], response: Any, *, answer_key: str = "answer", ignore_case: bool = False) -> float:
    """1.0 when the response equals the reference answer, ignoring white space at both ends, else 0.0."""
    answer, expected = response_text(response).strip(), reference_text(task, answer_key).strip()
    if ignore_case:
        answer, expected = answer.casefold(), expected.casefold()
    return float(answer == expected)


def contains(task: dict[str, Any], response: Any, *, answer_key: str = "answer", ignore_case: bool = True) -> float:
    """1.0 when the reference answer occurs in the response, else 0.0."""
    answer, expected = response_text(response), reference_text(task, answer_key).strip()
    if ignore_case:
        answer, expected = answer.casefold(), expected.casefold()
    return float(expected in answer)


def matches_format(task: dict[str, Any], response: Any, *, pattern: Pattern) -> float:
    """1.0 when the whole response, without white space at both ends, matches the regular expression, else 0.0.

    A dot also matches line ends. Raises PatternTimeoutError if the match takes too long.
    """
    return float(full_match(pattern, response_text(response).strip(), re.DOTALL) is not None)


def within_length(
    task: dict[str, Any], response: Any, *, max_chars: int, min_chars: int = 0, margin_chars: int = 0
) -> float:
    """1.0 for a response of ``min_chars`` to ``max_chars`` characters.

    Outside this range the reward falls linearly to 0.0 over ``margin_chars`` characters.
    """
    length = len(response_text(response))
    outside = max(min_chars - length, length - max_chars, 0)
    if outside == 0:
        return 1.0
    return max(0.0, 1.0 - outside / margin_chars) if margin_chars else 0.0


_OPENING = re.compile(r"```[^\n`]*+\n")
_CLOSING = re.compile("```")


def regex(
    task: dict[str, Any], response: Any, *, pattern: Pattern, answer_key: str = "answer", ignore_case: bool = False
) -> float:
    """1.0 when the text captured by the pattern's last match equals the reference answer, else 0.0.

    The captured text is the group ``answer``, else the first group, else the whole match, without white space at both
    ends. A dot also matches line ends. Raises PatternTimeoutError if the search takes too long.
    """
    match = last_match(pattern, response_text(response), re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    if match is None:
        return 0.0
    answer = match["answer"] if "answer" in match.groupdict() else match[1] if match.groups() else match[0]
    answer, expected = (answer or "").strip(), reference_text(task, answer_key).strip()
    return float(answer.casefold() == expected.casefold() if ignore_case else answer == expected)


def json_schema(
    task: dict[str, Any], response: Any, *, schema: dict[str, Any] | None = None, schema_key: str | None = None
) -> float:
    """1.0 when the response is one JSON document (alone or in a fence) that the schema allows, else 0.0.

    The schema is given as ``schema``, or by the task's column ``schema_key`` (an object or JSON text). A response that
    is data (a number, an object, a list) is validated as it is; of a message (with ``role`` and ``content``), and of a
    list of messages or content parts, the text is. Raises ValueError for an invalid schema, PatternTimeoutError if a
    search for one of its patterns takes too long.
    """
    if (schema is None) == (schema_key is None):
        raise ValueError("give one of schema and schema_key")
    selected: Any = schema if schema_key is None else task[schema_key]
    try:
        document = response if _is_document(response) else json.loads(_unfenced(response_text(response)))
    except (ValueError, RecursionError):  # no JSON, or too deep for Python
        return 0.0
    return float(allows(selected, document))


def tags(
    task: dict[str, Any],
    response: Any,
    run: JudgedRun,
    *,
    tags: tuple[str, ...] | list[str] = ("think", "answer"),
    alone: bool = True,
) -> float:
    """1.0 when the response has each tag once, closed, not empty and in this order, else 0.0.

    ``alone``: there is only white space outside the tags. Reasoning that the engine has parsed into
    ``reasoning_content`` counts as a tag ``think`` before the text.
    """
    text = response_text(response)
    thoughts = run.messages[-1].get("reasoning_content")
    if thoughts and "<think>" not in text:
        text = f"<think>{thoughts}</think>{text}"
    between = r"\s*" if alone else r".*?"
    parts = [rf"<{re.escape(tag)}>(?!\s*</).*?</{re.escape(tag)}>" for tag in tags]
    once = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags)
    return float(once and re.fullmatch(between + between.join(parts) + between, text, re.DOTALL) is not None)


_JSON = (str, int, float, dict, list, type(None))


def _is_document(response: Any) -> bool:
    """Whether a workflow returned data instead of text, a message, or a list of messages or content parts."""
    if isinstance(response, list):
        messages = len(response) > 0 and all(map(_is_message, response))
        return not messages and not _are_parts(response) and all(isinstance(each, _JSON) for each in response)
    return isinstance(response, int | float) or (isinstance(response, dict) and not _is_message(response))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and "content" in value


def _are_parts(values: list[Any]) -> bool:
    """Whether ``values`` are the parts of a message's content, with text among them."""
    typed = all(isinstance(each, dict) and "type" in each for each in values)
    return typed and any(each["type"] in ("text", "output_text") and "text" in each for each in values)


def _unfenced(text: str) -> str:
    fenced = last_enclosed(text, _OPENING, _CLOSING)
    return text if fenced is None else fenced
