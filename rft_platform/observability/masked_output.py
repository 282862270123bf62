"""Text stream that masks secrets, for standard output and error.

Standard library only: rollout workers run under foreign interpreters.
"""

import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from rft_platform.common.redaction import redact


class _MaskedStream:
    """Writes text to ``stream`` with secrets masked; delegates all other attributes to ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, masked; returns the length of the unmasked text, as callers expect."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line, masked."""
        for line in lines:
            self.write(line)

    def close(self) -> None:
        """Flush only: a user's code may close its output, and the process still prints its results."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def masked(stream: TextIO) -> TextIO:
    """``stream`` with masking; a stream that already masks is returned unchanged."""
    return stream if isinstance(stream, _MaskedStream) else cast(TextIO, _MaskedStream(stream))


def unmasked(stream: TextIO) -> TextIO:
    """The underlying stream without masking, for the one secret that a command prints on purpose: the sign-in link."""
    return stream._stream if isinstance(stream, _MaskedStream) else stream


def mask_output() -> None:
    """Mask secrets in all later output of this process, tracebacks included. For entry points of processes."""
    sys.stdout, sys.stderr = masked(sys.stdout), masked(sys.stderr)
