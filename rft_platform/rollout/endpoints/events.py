"""Server-sent events: taken from a stream of bytes, and written."""

from typing import Any

from rft_platform.inference.serving.json_codec import dump, parse

END = b"\n\n"


class EventStream:
    """Splits the bytes of a server-sent event stream into events, whatever the network cut them into."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by ``data``, each without its closing blank line."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(END)
        return events

    def rest(self) -> bytes:
        """What came after the last complete event."""
        return self._rest


def event_chunk(event: bytes) -> dict[str, Any] | None:
    """The JSON object that a ``data:`` event carries; ``None`` for ``[DONE]``, comments and other fields."""
    data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    if not data.startswith(b"{"):
        return None
    chunk: dict[str, Any] = parse(data)
    return chunk


def with_data(event: bytes, chunk: dict[str, Any]) -> bytes:
    """``event`` with other data; its further fields stay."""
    fields = [line for line in event.split(b"\n") if not line.startswith(b"data:")]
    return b"\n".join([*fields, b"data: " + dump(chunk)]) + END


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """An event with a name, as the responses endpoint sends them."""
    return b"event: " + name.encode() + b"\ndata: " + dump(data) + END
