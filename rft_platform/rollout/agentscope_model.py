"""AgentScope's chat model on top of a model handle. Importing this module imports AgentScope (1.0.x) and ``openai``."""

from functools import lru_cache
from typing import Any

import openai
from agentscope.model import OpenAIChatModel

_HANDLE = "_handle"


class RecordedChatModel(OpenAIChatModel):
    """An ``OpenAIChatModel`` whose client is the handle's; everything else it asks the handle.

    The handle is a run's ``ModelHandle``, whose calls are recorded, or an ``AuxiliaryModel``, whose calls are not.
    Where a call names no sampling, that of the taskset or of the model's configuration counts.
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
        """The chat model of another of the run's trainable policies."""
        return RecordedChatModel(self._handle.policy(name))

    def __getattr__(self, name: str) -> Any:
        if name == _HANDLE:  # asked for before it is set: there is nothing to delegate to
            raise AttributeError(name)
        return getattr(self._handle, name)


@lru_cache(maxsize=1)
def _unused_connections() -> Any:
    """For the client that AgentScope makes and that is replaced at once: reading the certificates takes 30 ms."""
    return openai.DefaultAsyncHttpxClient()
