"""Build responses of the OpenAI API, whole and as chunks, for chat and for plain completions."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_platform.inference.serving.tokenizer import PolicyTokenizer
from rft_platform.inference.transformers_engine.answer_text import AnswerText
from rft_platform.inference.transformers_engine.output_parsers import ToolCall
from rft_platform.inference.transformers_engine.request import Request, TopLogprobs

NEVER = -9999.0  # log-prob of a token that cannot be sampled, as in OpenAI's API; JSON has no infinity


@dataclass
class AnswerForm:
    """Common fields of all parts of one response, and the optional fields that the caller requested."""

    chat: bool
    model: str
    tokenizer: PolicyTokenizer
    logprobs: bool
    token_ids: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def envelope(self, request: Request, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        """The fields around the choices."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "policy_version": request.policy_version,
        }

    def choice(self, index: int, reason: str | None, ids: list[int], logprobs: Any, **content: Any) -> dict[str, Any]:
        """One choice with its ``content`` fields."""
        extra = {"token_ids": ids} if self.token_ids else {}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason, **extra}

    def logprobs_of(self, ids: list[int], values: list[float], tops: Sequence[TopLogprobs]) -> dict[str, Any] | None:
        """The log-probs block; None if the caller did not request it."""
        if not self.logprobs:
            return None
        tops = tops or [[] for _ in ids]
        return (self._chat_logprobs if self.chat else self._plain_logprobs)(ids, values, tops)

    def _chat_logprobs(self, ids: list[int], values: list[float], tops: Sequence[TopLogprobs]) -> dict[str, Any]:
        content = [
            {**self._token(token, value), "top_logprobs": [self._token(*other) for other in top]}
            for token, value, top in zip(ids, values, tops, strict=True)
        ]
        return {"content": content}

    def _plain_logprobs(self, ids: list[int], values: list[float], tops: Sequence[TopLogprobs]) -> dict[str, Any]:
        texts = self.tokenizer.token_texts(ids)
        offsets = [0]
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


def whole_answer(form: AnswerForm, request: Request, texts: Sequence[AnswerText]) -> dict[str, Any]:
    """The whole response to a finished ``request``; ``texts`` has one entry per row."""
    choices = []
    for row, text in enumerate(texts):
        done = request.results[row]
        shown, calls = text.feed(done.token_ids, last=True)
        logprobs = form.logprobs_of(done.token_ids, done.logprobs, request.tops[row])
        content = (
            {"message": _message(shown, calls, text.thoughts)}
            if form.chat
            else {"text": shown, **_own_prompt(form, request, row)}
        )
        reason = text.finish_reason(done.finish_reason)
        choices.append(form.choice(row, reason, done.token_ids, logprobs, **content))
    answer = form.envelope(request, choices, chunk=False)
    if form.chat and form.token_ids:
        answer["prompt_token_ids"] = request.prompts[0]
    return {**answer, "usage": usage(request)}


def usage(request: Request) -> dict[str, int]:
    """Token counts of a finished request."""
    prompt = sum(map(len, request.prompts))
    completion = sum(len(done.token_ids) for done in request.results.values())
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _own_prompt(form: AnswerForm, request: Request, row: int) -> dict[str, Any]:
    return {"prompt_token_ids": request.prompts[row // request.sampling.n]} if form.token_ids else {}


def _message(text: str, calls: list[ToolCall], thoughts: str = "") -> dict[str, Any]:
    """The assistant's message; ``reasoning_content`` is present only if there is reasoning."""
    reasoning = {"reasoning_content": thoughts} if thoughts else {}
    if not calls:
        return {"role": "assistant", "content": text, **reasoning}
    return {"role": "assistant", "content": text or None, **reasoning, "tool_calls": [call.as_dict() for call in calls]}


class ChunkBuilder:
    """Builds the chunks of one choice of a streamed response. It buffers token ids and sends them with their text."""

    def __init__(self, form: AnswerForm, request: Request, row: int, text: AnswerText) -> None:
        self.form, self.request, self.row, self.text = form, request, row, text
        self.finished = False
        self._calls = 0
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[TopLogprobs] = []

    def first(self) -> dict[str, Any]:
        """The first chunk of a chat choice: the role and, if requested, the prompt's ids."""
        choice = {"index": self.row, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunk = self.form.envelope(self.request, [choice], chunk=True)
        if self.form.token_ids:
            chunk["prompt_token_ids"] = self.request.prompts[0]
        return chunk

    def add(
        self, ids: list[int], logprobs: list[float], tops: list[TopLogprobs], reason: str | None
    ) -> list[dict[str, Any]]:
        """The chunks for these tokens; no chunk while their text may still be part of a stop string or a tag."""
        self._ids += ids
        self._logprobs += logprobs
        self._tops += tops
        self.finished = reason is not None
        shown, calls = self.text.feed(ids, last=self.finished)
        if not (shown or calls or self.text.thoughts or self.finished):
            return []
        ids, self._ids = self._ids, []
        block = self.form.logprobs_of(ids, self._logprobs, self._tops)
        self._logprobs, self._tops = [], []
        seen = None if reason is None else self.text.finish_reason(reason)
        choice = self.form.choice(self.row, seen, ids, block, **self._content(shown, calls))
        return [self.form.envelope(self.request, [choice], chunk=True)]

    def _content(self, shown: str, calls: list[ToolCall]) -> dict[str, Any]:
        if not self.form.chat:
            return {"text": shown, **_own_prompt(self.form, self.request, self.row)}
        delta: dict[str, Any] = {"reasoning_content": self.text.thoughts} if self.text.thoughts else {}
        delta |= {"content": shown} if shown else {}
        if calls:
            delta["tool_calls"] = [{"index": self._calls + i, **call.as_dict()} for i, call in enumerate(calls)]
            self._calls += len(calls)
        return {"delta": delta}
