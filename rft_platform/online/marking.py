"""Explicit marks: ``mark("high-quality")`` before an agent is called marks its request for training.

``ExplicitMarkingStrategy`` accepts marked requests. A mark belongs to the thread or asyncio task that set it, and holds
for its next request.
"""

from contextvars import ContextVar

_MARK: ContextVar[str | None] = ContextVar("mark", default=None)


def mark(*labels: str) -> None:
    """Mark the next request of this thread or asyncio task for training."""
    _MARK.set(",".join(labels) or "marked")


def take_mark() -> str | None:
    """The mark of the next request, which is used up."""
    found = _MARK.get()
    _MARK.set(None)
    return found
