"""Build answers of the OpenAI API, whole and as chunks, for chat and for plain completions."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_platform.openai_api.errors import ApiError
from rft_platform.openai_api.parsers import AnswerText, ToolCall
from rft_platform.openai_api.tokenizer import PolicyTokenizer

NEVER = -9999.0  # log-prob of a token that cannot be sampled, as in OpenAI's API; JSON has no infinity

#: The likeliest tokens at one position: (token id, log-prob), best first.
TopLogprobs = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of an engine, as its model routes show it."""

    folder: Path
    max_model_len: int

    @property
    def names(self) -> tuple[str, str]:
        """Names that a request may give."""
        return self.folder.name, str(self.folder)

    def check(self, name: str) -> None:
        """Raise ApiError (404) if the model has not this name."""
        if name not in self.names:
            message = f"the model {name!r} does not exist: this engine serves {self.folder.name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    def entry(self, name: str) -> dict[str, Any]:
        """The answer to GET /v1/models/NAME. A path in a URL lacks its first slash."""
        name = f"/{name}" if f"/{name}" in self.names else name
        self.check(name)
        return {"id": name, "object": "model", "owned_by": "rft", "max_model_len": self.max_model_len}


@dataclass
class AnswerForm:
    """Common fields of all parts of one answer, and the optional fields that the caller requested."""

    chat: bool
    model: str
    tokenizer: PolicyTokenizer
    logprobs: bool
    token_ids: bool
    prompts: list[list[int]]
    n: int  # choices of each prompt
    policy_version: int | None = None  # set once the first token is sampled
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def whole(self, choices: list[dict[str, Any]], sampled: int) -> dict[str, Any]:
        """The whole answer; ``sampled``: number of sampled tokens."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._around(kind, choices), **self._chat_prompt(), "usage": self._usage(sampled)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One chunk."""
        return self._around("chat.completion.chunk" if self.chat else "text_completion", choices)

    def usage_chunk(self, sampled: int) -> dict[str, Any]:
        """The last chunk of a caller that requested the token counts; ``sampled``: number of sampled tokens."""
        return {**self.chunk([]), "usage": self._usage(sampled)}

    def first_chunk(self, row: int) -> dict[str, Any]:
        """The first chunk of a chat choice: the role and, if requested, the prompt's ids."""
        choice = {"index": row, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return {**self.chunk([choice]), **self._chat_prompt()}

    def own_prompt(self, row: int) -> dict[str, Any]:
        """The prompt's ids in a choice of a plain completion, if requested."""
        return {"prompt_token_ids": self.prompts[row // self.n]} if self.token_ids else {}

    def logprobs_of(
        self, ids: list[int], values: list[float], tops: Sequence[TopLogprobs], offset: int = 0
    ) -> dict[str, Any] | None:
        """The log-probs block, from character ``offset`` of the text on; None if the caller did not request it."""
        if not self.logprobs:
            return None
        tops = tops or [[] for _ in ids]
        return self._chat_logprobs(ids, values, tops) if self.chat else self._plain_logprobs(ids, values, tops, offset)

    def characters(self, ids: list[int]) -> int:
        """By how many characters these tokens move the text offsets of a plain completion."""
        return sum(map(len, self.tokenizer.token_texts(ids))) if self.logprobs and not self.chat else 0

    def _around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "policy_version": self.policy_version,
        }

    def _chat_prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[0]} if self.chat and self.token_ids else {}

    def _usage(self, sampled: int) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _chat_logprobs(self, ids: list[int], values: list[float], tops: Sequence[TopLogprobs]) -> dict[str, Any]:
        content = [
            {**self._token(token, value), "top_logprobs": [self._token(*other) for other in top]}
            for token, value, top in zip(ids, values, tops, strict=True)
        ]
        return {"content": content}

    def _plain_logprobs(
        self, ids: list[int], values: list[float], tops: Sequence[TopLogprobs], offset: int
    ) -> dict[str, Any]:
        texts = self.tokenizer.token_texts(ids)
        offsets = [offset]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [max(value, NEVER) for value in values],
            "top_logprobs": [{self._text(token): max(value, NEVER) for token, value in top} for top in tops],
            "text_offset": offsets[: len(ids)],
        }

    def _token(self, token: int, value: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": max(value, NEVER), "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return self.tokenizer.token_texts([token])[0]


class ChoiceBuilder:
    """Builds one choice, whole or as chunks. Chunks buffer token ids and send them with their text."""

    def __init__(self, form: AnswerForm, row: int, text: AnswerText) -> None:
        self.form, self.row, self.text = form, row, text
        self.finished = False
        self._calls = 0
        self._offset = 0  # characters of the tokens in earlier chunks
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[TopLogprobs] = []

    def whole(self, ids: list[int], logprobs: list[float], tops: list[TopLogprobs], reason: str) -> dict[str, Any]:
        """The choice of a whole answer, with all of its tokens."""
        thoughts, shown, calls = self.text.feed(ids, last=True)
        if not self.form.chat:
            return self._choice(ids, logprobs, tops, reason, text=shown)
        message = {"role": "assistant", "content": shown or None if calls else shown, **_parts(thoughts, calls)}
        return self._choice(ids, logprobs, tops, reason, message=message)

    def add(
        self, ids: list[int], logprobs: list[float], tops: list[TopLogprobs], reason: str | None
    ) -> list[dict[str, Any]]:
        """The chunks for these tokens; no chunk while their text may still be part of a stop string or a tag."""
        self._ids += ids
        self._logprobs += logprobs
        self._tops += tops
        self.finished = reason is not None
        thoughts, shown, calls = self.text.feed(ids, last=self.finished)
        if not (thoughts or shown or calls or self.finished):
            return []
        numbered = [{"index": self._calls + number, **call} for number, call in enumerate(calls)]
        self._calls += len(calls)
        delta = {**({"content": shown} if shown else {}), **_parts(thoughts, numbered)}
        content = {"delta": delta} if self.form.chat else {"text": shown}
        choice = self._choice(self._ids, self._logprobs, self._tops, reason, **content)
        self._offset += self.form.characters(self._ids)
        self._ids, self._logprobs, self._tops = [], [], []
        return [self.form.chunk([choice])]

    def _choice(
        self, ids: list[int], logprobs: list[float], tops: list[TopLogprobs], reason: str | None, **content: Any
    ) -> dict[str, Any]:
        form = self.form
        return {
            "index": self.row,
            **content,
            **({} if form.chat else form.own_prompt(self.row)),
            "logprobs": form.logprobs_of(ids, logprobs, tops, self._offset),
            "finish_reason": None if reason is None else self.text.finish_reason(reason),
            **({"token_ids": ids} if form.token_ids else {}),
        }


def _parts(thoughts: str, calls: list[ToolCall]) -> dict[str, Any]:
    """The fields of a message or a delta for reasoning and tool calls, if there are any."""
    return {**({"reasoning_content": thoughts} if thoughts else {}), **({"tool_calls": calls} if calls else {})}
