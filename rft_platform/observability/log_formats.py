"""The two formats of log lines: text for people, JSON for machines. Both mask secrets and show control characters."""

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any

from rft_platform.common.redaction import redact, visible
from rft_platform.observability.log_context import current


class HumanFormatter(logging.Formatter):
    """``12:30:01 INFO driver r0003/policy_checkpoint@1f2e3d4c rft_platform.phase: begins``."""

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
