"""``python -m chaos.online.echo_engine PORT [SECONDS]``: an engine that answers every chat at once with fixed tokens.

It speaks the part of the engines' OpenAI API that the recorder needs: token ids and log-probs, streamed or not.
``SECONDS`` is the time between two events of a streamed answer.
"""

import asyncio
import itertools
import json
import secrets
import socket
import sys
from typing import Any

import uvicorn

from rft_platform.inference.interface import EngineStatus

TOKENS = 16
_WORDS = [f"word{number} " for number in range(TOKENS)]
_PROMPT_IDS = list(range(24))
_ID = "chatcmpl-########"  # replaced in every answer
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream")
_VERSION = (b"x-policy-version", b"0")


def status() -> EngineStatus:
    """What a service knows of this engine."""
    return EngineStatus("transformers-echo", "echo", 0, "0" * 64, "0" * 64, False, "float32", 2048, 0, 0.0)


def _logprobs(words: list[str]) -> dict[str, Any]:
    return {"content": [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []} for word in words]}


def _whole(n: int) -> bytes:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(_WORDS)},
            "logprobs": _logprobs(_WORDS),
            "token_ids": list(range(TOKENS)),
            "finish_reason": "stop",
        }
        for index in range(n)
    ]
    usage = {"prompt_tokens": len(_PROMPT_IDS), "completion_tokens": TOKENS, "total_tokens": len(_PROMPT_IDS) + TOKENS}
    return json.dumps(
        {"id": _ID, "object": "chat.completion", "created": 0, "model": "echo", "choices": choices, "usage": usage,
         "prompt_token_ids": _PROMPT_IDS}
    ).encode()  # fmt: skip


def _streamed(n: int) -> list[bytes]:
    head = {"id": _ID, "object": "chat.completion.chunk", "created": 0, "model": "echo"}
    events = []
    for place, word in enumerate(_WORDS):
        ends = "stop" if place == TOKENS - 1 else None
        choices = [
            {"index": index, "delta": {"role": "assistant", "content": word}, "logprobs": _logprobs([word]),
             "token_ids": [place], "finish_reason": ends}
            for index in range(n)
        ]  # fmt: skip
        first = {"prompt_token_ids": _PROMPT_IDS} if place == 0 else {}
        events.append(b"data: " + json.dumps({**head, **first, "choices": choices}).encode() + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]


def echo_app(pause_s: float = 0.0) -> Any:
    """The ASGI application of the engine."""
    numbers = itertools.count()
    whole, streamed = {n: _whole(n) for n in range(1, 5)}, {n: _streamed(n) for n in range(1, 5)}
    run = secrets.token_hex(4)  # of this process: ids never repeat

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; ``n`` and ``stream`` of its body count, everything else is ignored."""
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = json.loads(b"".join(parts) or b"{}")
        name = f"chatcmpl-{run}{next(numbers):08d}".encode()
        n = min(max(int(body.get("n") or 1), 1), 4)
        if not body.get("stream"):
            content = whole[n].replace(_ID.encode(), name)
            length = (b"content-length", str(len(content)).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [_JSON, _VERSION, length]})
            await send({"type": "http.response.body", "body": content})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [_EVENTS, _VERSION]})
        for event in streamed[n]:
            await send({"type": "http.response.body", "body": event.replace(_ID.encode(), name), "more_body": True})
            if pause_s:
                await asyncio.sleep(pause_s)
        await send({"type": "http.response.body", "body": b""})

    return app


def main() -> None:
    """Serve until a signal."""
    port, pause_s = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    config = uvicorn.Config(
        echo_app(pause_s), lifespan="off", log_level="warning", access_log=False, timeout_keep_alive=600
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
