"""Standard output and error without secrets: a text stream that masks what is written to it.

Standard library only: rollout workers run under foreign interpreters.
"""

import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from rft_platform.redaction import redact


class _MaskedStream:
    """Passes text on to ``stream`` with its secrets masked; everything else is that of ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, masked. Returns the length of what was given, as callers expect."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line, masked."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def masked(stream: TextIO) -> TextIO:
    """``stream`` with a mask before it; a stream that has one already is returned as it is."""
    return stream if isinstance(stream, _MaskedStream) else cast(TextIO, _MaskedStream(stream))


def unmasked(stream: TextIO) -> TextIO:
    """The stream behind the mask, for the one secret that a command prints on purpose: the link to open."""
    return stream._stream if isinstance(stream, _MaskedStream) else stream


def mask_output() -> None:
    """Mask secrets in everything that this process prints from now on, tracebacks included. For process entries."""
    sys.stdout, sys.stderr = masked(sys.stdout), masked(sys.stderr)
