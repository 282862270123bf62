"""Parallel branches of a run: which of its calls and states belong to the code that asks.

Tasks and threads (``asyncio.create_task``, ``gather``, ``to_thread``) start with a copy of the context of the code that
starts them. So each mark knows the mark that was made before it in its context or in the one that was copied. What
follows a branch's own last mark was made by the branch, or by tasks that it started.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A place in a run: after the mark ``before``."""

    run: "Branches"
    before: "Mark | None"
    depth: int = 0

    def follows(self, earlier: "Mark") -> bool:
        """Whether this mark is ``earlier``, or was made after it in its branch or in one that started there."""
        mark: Mark | None = self
        while mark is not None and mark.depth > earlier.depth:
            mark = mark.before
        return mark is earlier


_LAST: ContextVar[Mark | None] = ContextVar("rft_last_mark", default=None)


class Branches:
    """The marks of one run. A context that does not come from its workflow has none: the gateway, a pool's thread."""

    def start(self) -> None:
        """Call this in the context in which the workflow is about to run."""
        _LAST.set(Mark(self, None))

    def mark(self) -> Mark | None:
        """Make a mark in this context; None if the context does not come from the workflow."""
        last = self._last()
        if last is None:
            return None
        made = Mark(self, last, last.depth + 1)
        _LAST.set(made)
        return made

    def latest(self, items: Sequence[tuple[Mark | None, Item]]) -> Item | None:
        """Return the last item of this branch; the last of all if the branch has none. None without items.

        Items without a mark may belong to any branch.
        """
        place = self._last() if items else None
        while place is not None and not any(mark is not None and mark.follows(place) for mark, _ in reversed(items)):
            place = place.before
        ours = (item for mark, item in reversed(items) if place is None or mark is None or mark.follows(place))
        return next(ours, None)

    def _last(self) -> Mark | None:
        last = _LAST.get()
        return last if last is not None and last.run is self else None
