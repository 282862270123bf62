"""AgentScope 2.x: a chat model that wraps a model handle. Importing this module imports AgentScope and ``openai``."""

from typing import Any

from agentscope.credential import OpenAICredential
from agentscope.model import OpenAIChatModel

from rft_platform.rollout.workflows.chat_models import DelegatesToHandle, unused_connections


class RecordedChatModel(DelegatesToHandle, OpenAIChatModel):
    """An ``OpenAIChatModel`` that uses the handle's client and delegates all other attributes to the handle."""

    def __init__(self, handle: Any) -> None:
        """``handle`` has ``model_name`` and ``get_openai_async_client()``, whose client retries failed requests."""
        super().__init__(
            OpenAICredential(api_key="EMPTY"),
            handle.model_name,
            stream=False,
            max_retries=0,
            client_kwargs={"http_client": unused_connections()},
        )
        self._handle = handle
        self.client = handle.get_openai_async_client()
