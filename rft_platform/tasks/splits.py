"""Split expressions with the syntax of ``datasets.load_dataset``: ``train[:100]``, ``train[10%:20%]``, ``a+b``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rft_platform.common.errors import UserError

Row = TypeVar("Row")

_PART = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")

#: Synonyms of a split in file names.
ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One split, or a slice of it. Bounds are texts as written (``100``, ``-5``, ``10%``), or None."""

    name: str
    start: str | None = None
    stop: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole split."""
        return self.start is None and self.stop is None

    def of(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The slice of a split's rows; percentages are rounded to the nearest row."""
        return rows[_bound(self.start, len(rows)) : _bound(self.stop, len(rows))]


def split_parts(expression: str) -> list[SplitPart]:
    """The splits of an expression, which are concatenated; UserError for an invalid expression."""
    parts = []
    for text in expression.split("+"):
        match = _PART.fullmatch(text.strip())
        if match is None:
            raise UserError(
                f"split {expression!r}: expected the name of a split, perhaps with a slice, as in train, train[:100], "
                "train[10%:20%] or train+test"
            )
        parts.append(SplitPart(match["name"], match["start"], match["stop"]))
    return parts


def words_for(split: str) -> tuple[str, ...]:
    """The words that mark a file name as part of ``split``."""
    return next((words for words in ALIASES.values() if split in words), (split,))


def names_split(stem: str, split: str) -> bool:
    """Whether a file name without suffix contains a word for ``split``, separated from other letters."""
    return any(re.search(rf"(^|[-._ \d]){re.escape(word)}($|[-._ \d])", stem) for word in words_for(split))


def names_any_split(stem: str) -> bool:
    """Whether a file name contains a word for one of the usual splits."""
    return any(names_split(stem, split) for split in ALIASES)


def _bound(text: str | None, count: int) -> int | None:
    if text is None:
        return None
    return round(count * int(text[:-1]) / 100) if text.endswith("%") else int(text)
