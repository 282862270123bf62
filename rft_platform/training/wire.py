"""How messages travel between the trainer group and its callers: one JSON object a line over a loopback socket."""

import json
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

from rft_platform import errors
from rft_platform.errors import RftError, TrainerError

Message = dict[str, Any]


class Connection:
    """One socket that carries JSON lines; either end may use it."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._reader = connected.makefile("rb")

    def send(self, message: Message) -> None:
        """Write one message; raises OSError where the other end is gone."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end closes. A line cut short by its sender's death is not a message."""
        for line in self._reader:
            if line.endswith(b"\n"):
                yield json.loads(line)

    def close(self) -> None:
        """Close both directions."""
        self._reader.close()
        self._socket.close()


def error_message(error: RftError) -> Message:
    """An error as the answer to a command."""
    return {"event": "error", "kind": type(error).__name__, "message": str(error), "retryable": error.retryable}


def raise_error(message: Message) -> NoReturn:
    """Raise the error that ``error_message`` described, as its own class where that is one of the platform's."""
    kind = getattr(errors, message["kind"], TrainerError)
    raise kind(message["message"])
