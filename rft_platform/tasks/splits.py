"""Split expressions as ``datasets.load_dataset`` reads them: ``train[:100]``, ``train[10%:20%]``, ``a+b``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rft_platform.errors import UserError

Row = TypeVar("Row")

_PART = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")

#: Other words for a split in the names of its files.
ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One split, or a slice of it; bounds as written (``100``, ``-5``, ``10%``), None where there is none."""

    name: str
    start: str | None = None
    stop: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut off."""
        return self.start is None and self.stop is None

    def of(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The slice of a split's rows; percentages are rounded to the nearest row."""
        return rows[_bound(self.start, len(rows)) : _bound(self.stop, len(rows))]


def split_parts(expression: str) -> list[SplitPart]:
    """The splits that an expression adds up; UserError for what is no such expression."""
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
    """The words by which a file's name says that it holds ``split``."""
    return next((words for words in ALIASES.values() if split in words), (split,))


def names_split(stem: str, split: str) -> bool:
    """Whether a file's name without its suffix holds one of the words for ``split``, set off from other letters."""
    return any(re.search(rf"(^|[-._ \d]){re.escape(word)}($|[-._ \d])", stem) for word in words_for(split))


def names_any_split(stem: str) -> bool:
    """Whether a file's name says which of the usual splits it holds."""
    return any(names_split(stem, split) for split in ALIASES)


def _bound(text: str | None, count: int) -> int | None:
    if text is None:
        return None
    return round(count * int(text[:-1]) / 100) if text.endswith("%") else int(text)
