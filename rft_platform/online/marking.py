"""Explicit marks: call ``mark("high-quality")`` before an agent to mark the agent's request for training.

``ExplicitMarkingStrategy`` accepts marked requests. A mark belongs to the thread or asyncio task that set it, and is
valid for the next request of that thread or task.
"""

from contextvars import ContextVar

_MARK: ContextVar[str | None] = ContextVar("mark", default=None)


def mark(*labels: str) -> None:
    """Mark the next request of this thread or asyncio task for training."""
    _MARK.set(",".join(labels) or "marked")


def take_mark() -> str | None:
    """Return the mark of the next request and remove it."""
    found = _MARK.get()
    _MARK.set(None)
    return found
