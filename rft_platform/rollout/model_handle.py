"""The ``model`` that a workflow is handed: the policy, with every call of this run recorded."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

from rft_platform.rollout.history import RecordedCall, RunHistory

if TYPE_CHECKING:
    import openai

    from rft_platform.rollout.recording import ConnectionPools


class ModelHandle:
    """The policy as one run sees it. Handles of different runs share connections and nothing else."""

    def __init__(self, pools: "ConnectionPools", history: RunHistory, model_path: str) -> None:
        self._pools = pools
        self._history = history
        self.model_path = model_path

    @property
    def model_name(self) -> str:
        """What to give as ``model`` in a request."""
        return self.model_path

    def get_openai_async_client(self) -> "openai.AsyncOpenAI":
        """An ``openai.AsyncOpenAI`` for any agent framework; one object a run."""
        return self._async_client

    def get_openai_client(self) -> "openai.OpenAI":
        """An ``openai.OpenAI``; one object a run. It blocks: use it from a thread (``asyncio.to_thread``)."""
        return self._sync_client

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """The assistant's message that continues ``messages``, in wire format, ready to be appended to them."""
        if tools:
            arguments["tools"] = tools
        client: Any = self._async_client
        answer = await client.chat.completions.create(model=self.model_name, messages=messages, **arguments)
        message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
        return message

    def extract_experience_from_history(self, clear_history: bool = True) -> list[RecordedCall]:
        """The calls recorded since the last clearing extraction; their ``reward`` and ``metrics`` may be set."""
        return self._history.extract(clear_history)

    @cached_property
    def _async_client(self) -> "openai.AsyncOpenAI":
        return self._pools.async_client(self._history)

    @cached_property
    def _sync_client(self) -> "openai.OpenAI":
        return self._pools.sync_client(self._history)
