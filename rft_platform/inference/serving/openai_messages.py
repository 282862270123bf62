"""Messages and tools of a chat request, as OpenAI's API defines them. Unknown fields are kept for the chat template."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class ContentPart(_Open):
    """A part of a message's content; engines read only text parts."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(_Open):
    """The function of a tool call; ``arguments`` is JSON text or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(_Open):
    """A tool call of an earlier turn."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ChatMessage(_Open):
    """One message of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None


class ToolFunction(_Open):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Open):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: ToolFunction


class NamedFunction(_Open):
    """The name of a function."""

    name: str


class ToolChoice(_Open):
    """The function that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction
