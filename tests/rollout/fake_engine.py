"""A policy engine small enough to predict every token: one letter, one token. Serves the chat subset over real HTTP."""

import asyncio
import hashlib
import json
import math
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from rft_platform.common.errors import EngineError
from rft_platform.inference.interface import (
    Completion,
    EngineStatus,
    Generation,
    PauseMode,
    SamplingParams,
)

END = 3  # the token that ends an answer


def answer_to(prompt: str, seed: int | None, choice: int) -> str:
    """The text that the engine samples: a digest, so that every prompt, seed and choice has its own."""
    return hashlib.sha256(f"{prompt}/{seed}/{choice}".encode()).hexdigest()[:12]


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in ids if token != END)


def logprobs_of(ids: Sequence[int]) -> list[float]:
    return [-math.log(1 + token % 7) for token in ids]


def render(messages: Sequence[dict[str, Any]]) -> str:
    return "".join(f"<{m['role']}>{m.get('content') or ''}" for m in messages)


class FakeEngine:
    """Implements ``PolicyEngine``; ``chat_requests`` are the bodies that came over HTTP."""

    def __init__(self) -> None:
        self.policy_version = 7
        self.chat_requests: list[dict[str, Any]] = []
        self.refuse_next = 0  # answer so many chat requests with 503 first
        self.stamps_version = True
        self.constrained = False  # says of its answers that a grammar constrained them
        self.text: str | None = None  # what it answers to everything
        self.dead = False
        self.abort: set[str] = set()  # prompts whose first completion comes back aborted
        self.hold: threading.Event | None = None  # chat requests wait for it
        self.left = 0  # callers who went away meanwhile
        self.extra_routes: dict[str, Any] = {}  # path -> what a GET is answered with
        self.authorizations: set[str] = set()  # headers of the chat requests
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._port = 0

    def wait_for(self, requests: int) -> None:
        """Return once so many chat requests have come."""
        end = time.monotonic() + 20
        while len(self.chat_requests) < requests:
            assert time.monotonic() < end, "no further request has come"
            time.sleep(0.01)

    # --- PolicyEngine

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def api_key(self) -> str:
        return "fake-key"

    def status(self) -> EngineStatus:
        if self.dead:
            raise EngineError("the engine does not answer")
        return EngineStatus(
            engine="fake-1", model_path="fake-model", policy_version=self.policy_version, weights_digest="w",
            template_hash="t", paused=False, dtype="float32", max_model_len=4096, pid=0, cpu_seconds=0.0,
        )  # fmt: skip

    def render(
        self, conversations: Sequence[list[dict[str, Any]]], tools: list[dict[str, Any]] | None = None
    ) -> list[list[int]]:
        return [encode(render(messages)) for messages in conversations]

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[Generation]:
        return [Generation(prompt, self._complete(prompt, sampling), self.policy_version) for prompt in prompts]

    def _complete(self, prompt: list[int], sampling: SamplingParams) -> list[Completion]:
        completions = []
        for choice in range(sampling.n):
            text = self.text or answer_to(decode(prompt), sampling.seed, choice)
            ids = [*encode(text), END]
            ids, reason = (ids, "stop") if len(ids) <= sampling.max_tokens else (ids[: sampling.max_tokens], "length")
            aborted = choice == 0 and decode(prompt) in self.abort
            completions.append(Completion(ids, logprobs_of(ids), "abort" if aborted else reason))  # type: ignore[arg-type]
        return completions

    def decode(self, sequences: Sequence[list[int]]) -> list[str]:
        return [decode(ids) for ids in sequences]

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        return [logprobs_of(ids) for ids in sequences]

    def score_everywhere(self, sequences: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        return {self.base_url: self.score(sequences)}

    def fetch_weights(self, folder: Path) -> None: ...

    def update_weights(self, folder: Path, policy_version: int) -> None:
        self.policy_version = policy_version

    def pause(self, mode: PauseMode = "wait") -> None: ...

    def resume(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {"requests": float(len(self.chat_requests))}

    def shutdown(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()

    # --- HTTP

    def serve(self) -> None:
        """Serve the chat subset on a free port of the loopback."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(self._app(), log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()  # the socket listens already: no need to wait

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            body = await request.json()
            if self.refuse_next:
                self.refuse_next -= 1
                return JSONResponse({"error": "busy"}, 503, {"retry-after-ms": "1"})
            self.chat_requests.append(body)
            self.authorizations.add(request.headers.get("authorization", ""))
            while self.hold is not None and not self.hold.is_set():
                await asyncio.sleep(0.02)
                if await request.is_disconnected():
                    self.left += 1
                    break
            answer = self._chat_answer(body)
            if not body.get("stream"):
                return answer
            return StreamingResponse(_events(answer), media_type="text/event-stream")

        @app.get("/{path:path}")
        async def get(path: str) -> Any:
            return self.extra_routes[f"/{path}"]

        return app

    def _chat_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = encode(render(body["messages"]))
        limit: int = body.get("max_completion_tokens") or body["max_tokens"]
        sampling = SamplingParams(max_tokens=limit, n=body.get("n") or 1, seed=body.get("seed"))
        choices = []
        for index, completion in enumerate(self._complete(prompt, sampling)):
            content: list[dict[str, Any]] = [{"token": chr(t), "logprob": p, "bytes": None, "top_logprobs": []}
                       for t, p in zip(completion.token_ids, completion.logprobs, strict=True)]  # fmt: skip
            choices.append(
                {
                    "index": index,
                    "message": _message(body, decode(completion.token_ids)),
                    "finish_reason": completion.finish_reason,
                    "logprobs": {"content": content} if body.get("logprobs") else None,
                    "token_ids": completion.token_ids if body.get("return_token_ids") else None,
                }
            )
        stamp = {"policy_version": self.policy_version} if self.stamps_version else {}
        stamp |= {"constrained": True} if self.constrained else {}
        ids = {"prompt_token_ids": prompt} if body.get("return_token_ids") else {}
        number = len(self.chat_requests)
        return {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": body["model"],
                "choices": choices, **ids, **stamp}  # fmt: skip


def _message(body: dict[str, Any], text: str) -> dict[str, Any]:
    """A prompt ``call: EXPRESSION`` is answered with a calculator call, as long as no tool has answered yet."""
    last = body["messages"][-1]
    if body.get("tools") and last["role"] == "user" and str(last["content"]).startswith("call: "):
        arguments = json.dumps({"expression": last["content"].removeprefix("call: ")})
        function = {"name": "calculator", "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
    return {"role": "assistant", "content": text}


async def _events(answer: dict[str, Any]) -> AsyncIterator[str]:
    """The answer as server-sent events: a token a chunk, choices interleaved, end and finish reason last."""
    common = {name: answer[name] for name in answer if name not in ("choices", "prompt_token_ids")}
    common["object"] = "chat.completion.chunk"

    def chunk(piece: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({**common, **more, 'choices': [piece]})}\n\n"

    first = {"prompt_token_ids": answer.get("prompt_token_ids")}
    for choice in answer["choices"]:
        delta = {key: value for key, value in choice["message"].items() if key != "content"}
        delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(delta.get("tool_calls") or [])] or None
        yield chunk({"index": choice["index"], "delta": delta, "finish_reason": None}, **first)
    longest = max(len(decode(choice["token_ids"] or [])) for choice in answer["choices"])
    for place in range(longest + 1):
        for choice in answer["choices"]:
            ids, content = choice["token_ids"], (choice["logprobs"] or {}).get("content")
            if ids is None or place >= len(ids):
                continue
            last = place == len(ids) - 1
            text = decode(ids[place : place + 1]) if choice["message"]["content"] is not None else None
            yield chunk(
                {
                    "index": choice["index"],
                    "delta": {"content": text},
                    "token_ids": ids[place : place + 1],
                    "logprobs": {"content": content[place : place + 1]} if content else None,
                    "finish_reason": choice["finish_reason"] if last else None,
                }
            )
    yield "data: [DONE]\n\n"
