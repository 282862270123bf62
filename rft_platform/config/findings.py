"""What the checks before a start find, and the refusal of a start: one ``UserError`` with all errors.

The dry run and ``rft doctor`` present the same findings.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from rft_platform.common.errors import RftError, UserError


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: what it is about, and a sentence with the fix of a problem."""

    # error: a run must not start; warning: perhaps not intended; note: a fact
    level: Literal["error", "warning", "note"]
    key: str  # a key of rft.yaml, or a part of the machine or of the project's folder
    text: str

    def __str__(self) -> str:
        return self.text


def error(text: str, key: str = "") -> Finding:
    """A problem that prevents the start. Without ``key`` it is about the first word of ``text``."""
    return Finding("error", key or _first_word(text), text)


def warning(text: str, key: str = "") -> Finding:
    """A setting that has no effect or is perhaps not intended."""
    return Finding("warning", key or _first_word(text), text)


def note(text: str, key: str = "") -> Finding:
    """A fact."""
    return Finding("note", key or _first_word(text), text)


def raised(
    check: Callable[..., object], *arguments: object, key: str = "", kind: type[RftError] = UserError
) -> Iterator[Finding]:
    """The error of class ``kind`` that ``check`` raises, as a finding."""
    try:
        check(*arguments)
    except kind as problem:
        yield error(str(problem), key)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether one of the findings prevents the start."""
    return any(finding.level == "error" for finding in findings)


def refuse(findings: Iterable[Finding]) -> None:
    """Raise ``UserError`` with one line for each error, if there is one."""
    if lines := dict.fromkeys(finding.text for finding in findings if finding.level == "error"):
        raise UserError("\n".join(lines))


def _first_word(text: str) -> str:
    return text.split(maxsplit=1)[0].rstrip(":,")
