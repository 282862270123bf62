"""Context of log lines: the round, run and phase that the running code belongs to.

The start of a phase sets the context; every log line states it.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

LOG = logging.getLogger("rft_platform.phase")
HEADER = "x-rft-context"
_MESSAGE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class PhaseContext:
    """Round, run and phase of a log line; "" for unknown parts."""

    round: str = ""  # partition key, as in r0003
    run_id: str = ""  # Dagster run
    phase: str = ""

    def __str__(self) -> str:
        """The known parts, for example ``r0003/rollout_batches@1f2e3d4c``."""
        place = "/".join(part for part in (self.round, self.phase) if part)
        return f"{place}@{self.run_id[:8]}" if self.run_id else place

    @classmethod
    def from_header(cls, text: str) -> "PhaseContext":
        """Parse the header value of another process's ``context_headers``; an empty context if it is malformed."""
        parts = text.split(";")
        return cls(*parts) if len(parts) == 3 else _NOTHING


_NOTHING = PhaseContext()
_context: ContextVar[PhaseContext] = ContextVar("rft_phase", default=_NOTHING)
#: Open phases of this process. Threads that a phase starts have no log context, and use this instead.
_open: list[PhaseContext] = []


def current() -> PhaseContext:
    """The caller's context; in a thread without a context, the context of the process's only open phase."""
    own = _context.get()
    if own is not _NOTHING or len(_open) != 1:
        return own
    return _open[0]


def open_phases() -> list[PhaseContext]:
    """The phases that run in this process, oldest first."""
    return list(_open)


def context_headers() -> dict[str, str]:
    """HTTP headers that pass the context to another process of the platform; empty outside of phases."""
    context = current()
    return {} if context == _NOTHING else {HEADER: ";".join((context.round, context.run_id, context.phase))}


@contextmanager
def log_context(context: PhaseContext) -> Iterator[None]:
    """Set the context of all log lines of the block and of the threads that the block starts."""
    token = _context.set(context)
    _open.append(context)
    try:
        yield
    finally:
        _open.remove(context)
        _context.reset(token)


@contextmanager
def phase_context(round: int | str | None, run_id: str, phase: str) -> Iterator[None]:
    """Add round, run and phase to the block's log lines, and log the phase's start, end or failure.

    ``round`` is a number, a partition key, or None for work outside the rounds. Exceptions pass through.
    """
    key = f"r{round:04d}" if isinstance(round, int) else round or ""
    place = f"{phase} of {key}" if key else phase
    with log_context(PhaseContext(key, run_id, phase)):
        started = time.perf_counter()
        LOG.info("begins")
        try:
            yield
        except Exception as error:
            took, message = time.perf_counter() - started, " ".join(str(error).split())[:_MESSAGE_CHARACTERS]
            LOG.error("%s failed after %.1f s: %s: %s", place, took, type(error).__name__, message, exc_info=True)
            raise
        except BaseException as interruption:
            LOG.warning("%s interrupted after %.1f s", place, time.perf_counter() - started)
            LOG.info("interrupted by %s", type(interruption).__name__)
            raise
        LOG.info("done in %.1f s", time.perf_counter() - started)
