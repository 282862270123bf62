"""Logging set-up of every process of the platform: one handler, one format, chosen by the environment.

``RFT_LOG_FORMAT`` is ``human`` (default) or ``json``. ``RFT_LOG_LEVEL`` is the lowest level of the platform's own
lines (default INFO; lines of libraries start at WARNING). Lines go to standard error, which is a file below
``RFT_HOME/logs`` for every long-lived process; ``cluster/local/log_files.py`` bounds those files.

Both formats mask secrets and show control characters.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.redaction import redact, visible
from rft_platform.observability.log_context import current
from rft_platform.observability.log_context import phase_context as _phase_context
from rft_platform.observability.masked_output import mask_output

PACKAGE = "rft_platform"
PROGRESS = "rft_platform.common.progress"
_PROGRESS_EVERY_S = 10.0
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
#: Dagster's commands that execute a launched run, or a step of it, in a separate process.
_RUN_COMMANDS = ("execute_run", "execute_step")


class HumanFormatter(logging.Formatter):
    """``2026-01-31 12:30:01 INFO driver r0003/policy_checkpoint@1f2e3d4c rft_platform.phase: begins``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, followed by the traceback if the record has one."""
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        place = str(current())
        head = " ".join(part for part in (when, record.levelname, self._process, place, f"{record.name}:") if part)
        lines = [f"{head} {record.getMessage()}"]
        if (trace := exception_text(self, record)) is not None:
            lines.append(trace)
        return visible(redact("\n".join(lines)))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ts, level, process, pid, logger, round, run_id, phase, message, exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON object. ``round``, ``run_id``, ``phase`` and ``exception`` can be null; ``ts`` is UTC."""
        context, trace = current(), exception_text(self, record)
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "round": context.round or None,
            "run_id": context.run_id or None,
            "phase": context.phase or None,
            "message": visible(redact(record.getMessage())),
            "exception": None if trace is None else visible(redact(trace)),
        }
        return json.dumps(line, ensure_ascii=False)


def exception_text(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    """The traceback of a record; None if it has none."""
    if record.exc_info and record.exc_info[0] is not None:
        return formatter.formatException(record.exc_info)
    return record.exc_text


def wants_json() -> bool:
    """Whether ``RFT_LOG_FORMAT`` requests JSON lines; raises UserError for an unknown format."""
    log_format = os.environ.get("RFT_LOG_FORMAT", "human")
    if log_format not in ("human", "json"):
        raise UserError(f"RFT_LOG_FORMAT is {log_format!r}: set it to human or json, or unset it")
    return log_format == "json"


def configure(process: str) -> None:
    """Send the log lines of this process (``run``, ``engine``, ``trainer``, ...) to standard error; mask its output.

    Call it in a process's entry point. Only the first call has an effect: it is the nearest to the entry point, so it
    names the process best.
    """
    mask_output()
    _add_handler(process)


def _add_handler(process: str) -> None:
    root = logging.getLogger()
    if not any(isinstance(handler, PlatformHandler) for handler in root.handlers):
        root.addHandler(PlatformHandler(process))
        package = logging.getLogger(PACKAGE)
        package.setLevel(_level())


@contextmanager
def configured(process: str) -> Iterator[None]:
    """Send log lines to standard error during the block only: outside the block a command prints only its output."""
    root, package = logging.getLogger(), logging.getLogger(PACKAGE)
    handlers, level = list(root.handlers), package.level
    _add_handler(process)
    try:
        yield
    finally:
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        package.setLevel(level)


@contextmanager
def phase_context(round: int | str | None, run_id: str, phase: str) -> Iterator[None]:
    """Add round, Dagster run id and phase to every log line of the block.

    ``round`` is a number, a partition key, or None for work outside the rounds. In a process that Dagster started for
    the run, this function configures logging first; in other processes the caller must have called ``configure``.
    """
    if any(command in sys.argv for command in _RUN_COMMANDS):
        configure("run")
    with _phase_context(round, run_id, phase):
        yield


class PlatformHandler(logging.Handler):
    """Writes to the current ``sys.stderr`` (a driver redirects it) and limits the rate of progress lines."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter(process) if wants_json() else HumanFormatter(process))
        self._progress: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; errors go to logging's ``handleError`` and are not raised."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the record.

        Library records pass from level WARNING on. Progress records pass at most every ten seconds; the last one always
        passes.
        """
        if not record.name.startswith(PACKAGE) and record.levelno < logging.WARNING:
            return False
        if record.name == PROGRESS and not self._is_due(record):
            return False
        return bool(super().filter(record))

    def _is_due(self, record: logging.LogRecord) -> bool:
        progress = getattr(record, "progress", None)
        if progress is None or progress.done >= progress.total:
            return True
        now = time.monotonic()
        if now - self._progress.get(progress.what, -_PROGRESS_EVERY_S) < _PROGRESS_EVERY_S:
            return False
        self._progress[progress.what] = now
        return True


def _level() -> str:
    level = os.environ.get("RFT_LOG_LEVEL", "INFO").upper()
    if level not in _LEVELS:
        raise UserError(f"RFT_LOG_LEVEL is {level!r}: expected one of {', '.join(_LEVELS)}")
    return level
