"""AgentScope's chat model on top of a model handle. Importing this module imports AgentScope (1.0.x)."""

from typing import Any

from agentscope.model import OpenAIChatModel

from rft_platform.rollout.model_handle import ModelHandle


class RecordedChatModel(OpenAIChatModel):
    """An ``OpenAIChatModel`` whose client is the handle's recording one; everything else it asks the handle."""

    def __init__(self, handle: ModelHandle) -> None:
        super().__init__(model_name=handle.model_name, api_key="EMPTY", stream=False)
        self.client = handle.get_openai_async_client()
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if name == "_handle":  # asked for before it is set: there is nothing to delegate to
            raise AttributeError(name)
        return getattr(self._handle, name)
