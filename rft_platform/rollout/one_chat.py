"""The short way to one chat completion, for whatever makes OpenAI clients."""

from typing import Any, Protocol


class HasClients(Protocol):
    """A model that is asked through OpenAI clients."""

    @property
    def model_name(self) -> str:
        """What to give as ``model`` in a request."""
        ...

    def get_openai_async_client(self) -> Any:
        """An ``openai.AsyncOpenAI``."""
        ...


async def one_chat(
    model: HasClients, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """The assistant's message that continues ``messages``, in wire format; raises what ``openai`` raises."""
    given = {**arguments, "tools": tools} if tools else arguments
    client = model.get_openai_async_client()
    answer = await client.chat.completions.create(model=model.model_name, messages=messages, **given)
    message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
    return message
