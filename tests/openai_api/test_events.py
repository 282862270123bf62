"""Server-sent events, however the network cuts them."""

import pytest

from rft_platform.openai_api.streams import EventStream, event_chunk

SENT = [{"n": 1}, {"n": 2, "text": "a\\nb"}]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_wherever_they_are_cut(end: bytes, size: int) -> None:
    data = b'data: {"n": 1}\n\nevent: e\ndata: {"n": 2, "text": "a\\\\nb"}\n\ndata: [DONE]\n\n'.replace(b"\n", end)
    stream = EventStream()
    events = [event for start in range(0, len(data), size) for event in stream.feed(data[start : start + size])]
    assert [event_chunk(event) for event in events] == [*SENT, None]
    assert stream.rest() == b""
