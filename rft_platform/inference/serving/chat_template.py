"""Render conversations to prompt ids through the model's chat template."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rft_platform.common import json_codec
from rft_platform.common.errors import UserError
from rft_platform.inference.serving.template_process import TemplateLimitError, template_process
from rft_platform.inference.serving.tokenizer import PolicyTokenizer

LOG = logging.getLogger(__name__)
#: Variables that a request cannot set: the conversation itself, and parameters and functions of the renderer.
RESERVED_VARIABLES = frozenset(
    {
        *("self", "messages", "tools", "documents", "conversation", "conversations", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        *("raise_exception", "strftime_now"),
    }
)
Message = dict[str, Any]


class ChatTemplate:
    """The chat template of an engine."""

    def __init__(
        self, tokenizer: PolicyTokenizer, source: str | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """``source``: a Jinja template instead of the tokenizer's; ``options``: default variables of the template."""
        self.tokenizer = tokenizer
        self.options = options or {}
        self.source: str | None = source or tokenizer.hf.chat_template

    @property
    def digest(self) -> str:
        """SHA-256 of the template's text and default variables; empty for a model without a template."""
        options = json.dumps(self.options, sort_keys=True) if self.options else ""
        return hashlib.sha256((self.source + options).encode()).hexdigest() if self.source else ""

    def check(self) -> None:
        """Render a test question; raises TemplateLimitError if the template exceeds its limits."""
        if self.source is None:
            return
        try:
            self.text([{"role": "user", "content": "2+2?"}])
        except TemplateLimitError:
            raise
        except UserError as error:  # the template may require conversations of another form
            LOG.warning("the chat template refuses a plain question: %s", error)

    def text(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, with the generation prompt. ``options`` are variables of the template."""
        (text,) = self.texts([messages], tools, options)
        return text

    def texts(
        self,
        conversations: Sequence[Sequence[Message]],
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """As ``text``, for several conversations."""
        if self.source is None:
            raise UserError("the model has no chat template: send prompts to /v1/completions, or set a chat template")
        variables = {**self.tokenizer.hf.special_tokens_map, **self.options, **(options or {})}
        check_variables(variables)
        messages = [[normalised(message) for message in conversation] for conversation in conversations]
        return template_process().render(self.source, messages, tools or None, variables)

    def render(
        self, conversations: Sequence[Sequence[Message]], tools: list[dict[str, Any]] | None = None
    ) -> list[list[int]]:
        """Prompt ids of each conversation."""
        return self.tokenizer.encode(self.texts(conversations, tools))


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise UserError if ``variables`` contains one of ``RESERVED_VARIABLES``, which the engine sets."""
    taken = sorted(RESERVED_VARIABLES & variables.keys())
    if taken:
        raise UserError(f"chat_template_kwargs: remove {', '.join(taken)}: only the engine sets these variables")


def normalised(message: Message) -> Message:
    """Convert a message to the form that templates expect: content is text, tool-call arguments are an object.

    Clients also send content as a list of text parts, as null or not at all, and arguments as a JSON string.
    """
    result = {**message, "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise UserError("tool_calls of a message must be a list of objects with a function")
        result["tool_calls"] = [_normalised_call(call) for call in calls]
    return result


def load_template(source: str | None) -> str | None:
    """The text of the template ``source``, which is a file's path or the text itself."""
    if source is None or "{" in source:
        return source
    path = Path(source)
    if not path.is_file():
        raise UserError(f"chat template {source!r}: neither a file nor the text of a Jinja template")
    return path.read_text(encoding="utf-8")


def text_of(content: Any) -> str:
    """The text of a message's content, which may be None, text or a list of text parts; UserError for anything else."""
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
    function = call.get("function") or {}
    if not isinstance(function, dict):
        raise UserError("the function of a tool call must be an object with name and arguments")
    function = dict(function)
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError):  # arguments that are no valid JSON (a model wrote them) stay text
            function["arguments"] = json_codec.parse(function["arguments"] or "{}")
    return {**call, "function": function}
