"""The chat-completions wire format: what a recording client adds to a request, reads in an answer and takes out again.

Token ids are asked for with ``return_token_ids`` and come back as ``prompt_token_ids`` and ``choices[i].token_ids``,
log-probs as ``choices[i].logprobs.content[j].logprob``; streamed answers carry the same fields piece by piece.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft_platform.errors import EngineError
from rft_platform.inference.interface import SamplingParams

VERSION_HEADER = "x-policy-version"


@dataclass(frozen=True, slots=True)
class Asked:
    """Which of the fields that recording needs the caller asked for: these alone stay in its answer."""

    logprobs: bool
    token_ids: bool


def prepare(body: dict[str, Any], model: str, sampling: SamplingParams, seed: int) -> tuple[dict[str, Any], Asked]:
    """The request to send: the caller's, with recording switched on and the run's sampling where it names none.

    ``model`` replaces the name the caller gives: an agent written for another model talks to the policy unchanged.
    """
    asked = Asked(bool(body.get("logprobs")), bool(body.get("return_token_ids")))
    defaults: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
    if sampling.top_k > 0:
        defaults["top_k"] = sampling.top_k
    if sampling.stop:
        defaults["stop"] = list(sampling.stop)
    if body.get("max_completion_tokens") is None:
        defaults["max_tokens"] = sampling.max_tokens
    given = {name: value for name, value in body.items() if value is not None}
    return {**defaults, **given, "model": model, "logprobs": True, "return_token_ids": True}, asked


def restore(answer: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """The answer, or one chunk of a streamed one, as the caller asked for it. Changes ``answer`` in place."""
    if not asked.token_ids:
        answer.pop("prompt_token_ids", None)
    for choice in answer.get("choices") or []:
        if not asked.token_ids:
            choice.pop("token_ids", None)
        if not asked.logprobs and "logprobs" in choice:
            choice["logprobs"] = None
    return answer


def policy_version(answer: dict[str, Any], headers: Mapping[str, str]) -> int | None:
    """The version of the weights that answered: a field of the answer or a header; ``None`` where there is neither."""
    version = answer.get("policy_version", headers.get(VERSION_HEADER))
    return None if version is None else int(version)


@dataclass(slots=True)
class SampledChoice:
    """One choice of an answer."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    message: dict[str, Any]


def sampled_choices(answer: dict[str, Any]) -> tuple[list[int], list[SampledChoice]]:
    """Prompt ids and choices of an answer; EngineError where ids or log-probs are missing or do not match."""
    prompt_ids = answer.get("prompt_token_ids")
    if prompt_ids is None:
        raise EngineError(f"answer {answer.get('id')}: no prompt_token_ids; the engine must honour return_token_ids")
    choices = []
    for choice in answer["choices"]:
        token_ids = choice.get("token_ids")
        logprobs = [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or []]
        if token_ids is None or len(token_ids) != len(logprobs):
            found = "no" if token_ids is None else len(token_ids)
            raise EngineError(f"answer {answer.get('id')}: {found} token ids and {len(logprobs)} log-probs")
        reason = choice.get("finish_reason") or "stop"
        choices.append(SampledChoice(choice["index"], token_ids, logprobs, reason, choice["message"]))
    return prompt_ids, choices


class StreamedAnswer:
    """A streamed answer of ``n`` choices put together again from its chunks."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> bool:
        """Take in one chunk, before it is restored; True for the chunk that finishes the last choice."""
        self._fields.update({name: value for name, value in chunk.items() if name != "choices" and value is not None})
        finished = False
        for piece in chunk.get("choices") or []:
            choice = self._choices.setdefault(piece["index"], _empty_choice(piece["index"]))
            choice["token_ids"] += piece.get("token_ids") or []
            choice["logprobs"]["content"] += (piece.get("logprobs") or {}).get("content") or []
            _merge_message(choice["message"], piece.get("delta") or {})
            if piece.get("finish_reason") and choice["finish_reason"] is None:
                choice["finish_reason"] = piece["finish_reason"]
                finished = True
        return finished and len(self._choices) == self._n and all(c["finish_reason"] for c in self._choices.values())

    def whole(self) -> dict[str, Any]:
        """The answer so far, in the shape of one that was not streamed."""
        return {**self._fields, "choices": [self._choices[index] for index in sorted(self._choices)]}


def _empty_choice(index: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": None}
    return {"index": index, "message": message, "token_ids": [], "logprobs": {"content": []}, "finish_reason": None}


def _merge_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if value is None:
            continue
        if name == "tool_calls":
            for piece in value:
                _merge_tool_call(message.setdefault("tool_calls", []), piece)
        elif name == "role" or not isinstance(value, str):
            message[name] = value
        else:
            message[name] = (message.get(name) or "") + value


def _merge_tool_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    while len(calls) <= piece["index"]:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[piece["index"]], piece.get("function") or {}
    call["id"] = piece.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


class EventStream:
    """Splits the bytes of a server-sent event stream into events, whatever the network cut them into."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by ``data``, each without its closing blank line."""
        *events, self._rest = (self._rest + data.replace(b"\r\n", b"\n")).split(b"\n\n")
        return events

    def rest(self) -> bytes:
        """What came after the last complete event."""
        return self._rest


def event_chunk(event: bytes) -> dict[str, Any] | None:
    """The JSON object that a ``data:`` event carries; ``None`` for ``[DONE]``, comments and other fields."""
    data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    if not data.startswith(b"{"):
        return None
    chunk: dict[str, Any] = json.loads(data)
    return chunk
