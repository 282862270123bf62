"""Conversations to prompt ids, through the model's chat template."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rft_platform.errors import UserError
from rft_platform.inference.serving.tokenizer import PolicyTokenizer

Message = dict[str, Any]


class ChatTemplate:
    """The template that every prompt of this engine goes through."""

    def __init__(
        self, tokenizer: PolicyTokenizer, source: str | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """``source``: a Jinja template in place of the tokenizer's own; ``options``: variables, unless a call says."""
        self.tokenizer = tokenizer
        self.options = options or {}
        self.source: str | None = source or tokenizer.hf.chat_template

    @property
    def digest(self) -> str:
        """SHA-256 of the template's text, and of its variables where some are set; empty for a model without one."""
        options = json.dumps(self.options, sort_keys=True) if self.options else ""
        return hashlib.sha256((self.source + options).encode()).hexdigest() if self.source else ""

    def text(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
        """The prompt as text, up to where the assistant speaks next. ``options`` are variables of the template."""
        from jinja2 import TemplateError

        if self.source is None:
            raise UserError("the model has no chat template: send prompts to /v1/completions, or set a chat template")
        try:
            rendered: str = self.tokenizer.hf.apply_chat_template(
                [normalised(message) for message in messages],
                tools=tools or None,
                chat_template=self.source,
                add_generation_prompt=True,
                tokenize=False,
                **{**self.options, **options},
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise UserError(f"the chat template refuses these messages: {error}") from error
        return rendered

    def render(
        self, conversations: Sequence[Sequence[Message]], tools: list[dict[str, Any]] | None = None
    ) -> list[list[int]]:
        """Prompt ids of each conversation."""
        return self.tokenizer.encode([self.text(messages, tools) for messages in conversations])


def normalised(message: Message) -> Message:
    """A message as templates expect it: content is text, tool-call arguments are an object.

    Clients also send content as a list of text parts, as null or not at all, and arguments as a JSON string.
    """
    result = {**message, "content": text_of(message.get("content"))}
    if message.get("tool_calls"):
        result["tool_calls"] = [_normalised_call(call) for call in message["tool_calls"]]
    return result


def load_template(source: str | None) -> str | None:
    """A template given as a file's path or as the text itself."""
    if source is None or "{" in source:
        return source
    path = Path(source)
    if not path.is_file():
        raise UserError(f"chat template {source!r}: neither a file nor the text of a Jinja template")
    return path.read_text(encoding="utf-8")


def text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"message content must be text or a list of text parts, not {type(content).__name__}")
    kinds = {part.get("type") for part in content if isinstance(part, dict)}
    if not kinds <= {"text", "input_text", "output_text", "refusal"} or not all(isinstance(p, dict) for p in content):
        raise UserError(f"message content has parts {sorted(map(str, kinds))}: this engine reads text parts only")
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _normalised_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with suppress(json.JSONDecodeError):  # what a model wrote need not be JSON: the template then shows it as it is
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}
