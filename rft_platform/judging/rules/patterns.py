"""Judges that check an answer's form: a pattern that captures a value, a JSON schema, a sequence of tags."""

import json
import re
from typing import Any

from rft_platform.judging.judged_run import JudgedRun
from rft_platform.judging.response_text import reference_text, response_text
from rft_platform.judging.rules.json_schema import allows
from rft_platform.judging.rules.pattern_search import last_match
from rft_platform.tasks.enclosed_text import last_enclosed

_OPENING = re.compile(r"```[^\n`]*+\n")
_CLOSING = re.compile("```")


def regex(
    task: dict[str, Any], response: Any, *, pattern: str, answer_key: str = "answer", ignore_case: bool = False
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
    is not text is validated as it is. Raises ValueError for an invalid schema, PatternTimeoutError if a search for one
    of its patterns takes too long.
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


def _is_document(response: Any) -> bool:
    """Whether a workflow returned data instead of text or a message."""
    return isinstance(response, int | float) or (isinstance(response, dict) and "content" not in response)


def _unfenced(text: str) -> str:
    fenced = last_enclosed(text, _OPENING, _CLOSING)
    return text if fenced is None else fenced
