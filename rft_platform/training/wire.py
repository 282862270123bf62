"""Wire format between the trainer group and its callers: a token line, then one JSON object per line.

The token has its own line, so that the server checks it before it reads or parses anything larger.
"""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from rft_platform import errors
from rft_platform.errors import RftError, TrainerError

Message = dict[str, Any]
MAX_TOKEN_BYTES = 512
MAX_MESSAGE_BYTES = 1 << 30
TOKEN_TIMEOUT_S = 5.0  # from the connection until the end of the token line


class Connection:
    """A socket that carries JSON lines; both ends use it."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._reader = connected.makefile("rb")

    def send_token(self, token: str) -> None:
        """Authenticate the caller. Must be called before its first message."""
        self._socket.sendall(token.encode() + b"\n")

    def receive_token(self) -> str:
        """Read the caller's token line, within fixed limits of time and size.

        Raises OSError if it does not arrive in time, ValueError if it is too long or is not text.
        """
        deadline, line, timeout = time.monotonic() + TOKEN_TIMEOUT_S, b"", self._socket.gettimeout()
        while not line.endswith(b"\n"):
            if len(line) > MAX_TOKEN_BYTES:
                raise ValueError(f"the token line is longer than {MAX_TOKEN_BYTES} bytes")
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            byte = self._socket.recv(1)  # byte by byte: the buffered reader must get everything after the line
            if not byte:
                raise ConnectionError("the caller closed the connection before it sent a token")
            line += byte
        self._socket.settimeout(timeout)
        return line[:-1].decode()

    def send(self, message: Message) -> None:
        """Write one message. Raises OSError if the other end has closed."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the other end closes. A line cut short by the death of its sender is ignored.

        Raises ValueError for a line that is not a JSON object or is longer than ``MAX_MESSAGE_BYTES``.
        """
        while (line := self._reader.readline(MAX_MESSAGE_BYTES)).endswith(b"\n"):
            yield _parse(line)
        if len(line) == MAX_MESSAGE_BYTES:
            raise ValueError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")

    def close(self) -> None:
        """Close both directions."""
        self._reader.close()
        self._socket.close()


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a JSON object, not {type(message).__name__}")
    return message


def error_message(error: RftError) -> Message:
    """Encode an error as the answer to a command."""
    return {"event": "error", "kind": type(error).__name__, "message": str(error), "retryable": error.retryable}


def raise_error(message: Message) -> NoReturn:
    """Raise the error that ``error_message`` encoded, as its own class if that is an error class of the platform."""
    kind = getattr(errors, message["kind"], TrainerError)
    raise kind(message["message"])
