"""One chat completion through the OpenAI client of any model."""

from typing import Any, Protocol


class HasClients(Protocol):
    """A model that is called through OpenAI clients."""

    @property
    def model_name(self) -> str:
        """Value of ``model`` in a request."""
        ...

    def get_openai_async_client(self) -> Any:
        """Return an ``openai.AsyncOpenAI``."""
        ...


async def one_chat(
    model: HasClients, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the assistant message that continues ``messages``, in wire format; raises what ``openai`` raises."""
    given = {**arguments, "tools": tools} if tools else arguments
    client = model.get_openai_async_client()
    answer = await client.chat.completions.create(model=model.model_name, messages=messages, **given)
    message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
    return message
