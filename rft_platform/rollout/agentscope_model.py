"""AgentScope chat model that wraps a model handle. Importing this module imports AgentScope (1.0.x) and ``openai``."""

from functools import lru_cache
from typing import Any

import openai
from agentscope.model import OpenAIChatModel

_HANDLE = "_handle"


class RecordedChatModel(OpenAIChatModel):
    """An ``OpenAIChatModel`` that uses the handle's client and delegates all other attributes to the handle.

    The handle is a run's ``ModelHandle``, whose calls are recorded, or an ``AuxiliaryModel``, whose calls are not. A
    call without sampling parameters gets those of the taskset or of the model's configuration.
    """

    def __init__(self, handle: Any) -> None:
        """``handle`` has ``model_name`` and ``get_openai_async_client()``."""
        super().__init__(
            model_name=handle.model_name,
            api_key="EMPTY",
            stream=False,
            client_kwargs={"http_client": _unused_connections()},
        )
        self._handle = handle
        self.client = handle.get_openai_async_client()

    def policy(self, name: str) -> "RecordedChatModel":
        """Return the chat model of another trainable policy of the run."""
        return RecordedChatModel(self._handle.policy(name))

    def __getattr__(self, name: str) -> Any:
        if name == _HANDLE:  # looked up before it is set: there is no handle yet
            raise AttributeError(name)
        return getattr(self._handle, name)


@lru_cache(maxsize=1)
def _unused_connections() -> Any:
    """Shared HTTP client for the client that AgentScope creates and we replace: reading certificates takes 30 ms."""
    return openai.DefaultAsyncHttpxClient()
