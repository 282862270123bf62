"""The policy as the chat model of an agent framework: what a workflow function gets as ``model``."""

import importlib.util
from typing import Any

from rft_platform.rollout.model_handle import ModelHandle


def framework_model(handle: ModelHandle) -> Any:
    """``handle`` as AgentScope's ``OpenAIChatModel`` where AgentScope is installed, else ``handle`` itself.

    Either way it has every method of the handle, and its calls are recorded by the handle's clients.
    """
    if importlib.util.find_spec("agentscope") is None:
        return handle
    from rft_platform.rollout.agentscope_model import RecordedChatModel

    return RecordedChatModel(handle)
