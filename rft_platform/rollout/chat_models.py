"""A model as the chat model of an agent framework: what workflow and judge functions get."""

import importlib.metadata
import importlib.util
from functools import lru_cache
from typing import Any


def framework_model(handle: Any) -> Any:
    """``handle`` as AgentScope's ``OpenAIChatModel`` where AgentScope 1.x is installed, else ``handle`` itself.

    Either way it has every method of the handle (a ``ModelHandle`` or an ``AuxiliaryModel``), and its calls go through
    the handle's clients.
    """
    if not agentscope_has_chat_models():
        return handle
    from rft_platform.rollout.agentscope_model import RecordedChatModel

    return RecordedChatModel(handle)


@lru_cache(maxsize=1)
def agentscope_has_chat_models() -> bool:
    """Whether an AgentScope is installed whose agents take a chat model with a client that may be replaced."""
    if importlib.util.find_spec("agentscope") is None:
        return False
    return importlib.metadata.version("agentscope").startswith("1.")
