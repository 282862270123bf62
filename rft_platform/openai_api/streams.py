"""Parse and write server-sent events."""

from typing import Any

from rft_platform.common.json_codec import dump, parse

END = b"\n\n"
END_OF_STREAM = b"data: [DONE]" + END


class EventStream:
    """Splits the bytes of a server-sent event stream into events, however the network has split the bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events completed by ``data``, each without its closing blank line."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(END)
        return events

    def rest(self) -> bytes:
        """Bytes after the last complete event."""
        return self._rest


def event_chunk(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a ``data:`` event; ``None`` for ``[DONE]``, comments and other fields."""
    data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    if not data.startswith(b"{"):
        return None
    chunk: dict[str, Any] = parse(data)
    return chunk


def data_event(value: dict[str, Any]) -> bytes:
    """Return an event with data only, the form of chat and plain completions."""
    return b"data: " + dump(value) + END


def with_data(event: bytes, chunk: dict[str, Any]) -> bytes:
    """Return ``event`` with its data replaced and its other fields kept."""
    fields = [line for line in event.split(b"\n") if not line.startswith(b"data:")]
    return b"\n".join([*fields, b"data: " + dump(chunk)]) + END


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """Return an event with a name, the form that the responses endpoint uses."""
    return b"event: " + name.encode() + b"\ndata: " + dump(data) + END
