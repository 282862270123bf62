"""Wrap models as chat models of an agent framework, for workflow and judge functions."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel


def framework_model(handle: Any) -> Any:
    """Return ``handle`` as AgentScope's ``OpenAIChatModel`` where AgentScope 1.x is installed, else ``handle`` itself.

    Both results have every method of the handle (a ``ModelHandle`` or an ``AuxiliaryModel``) and call the model with
    the handle's clients.
    """
    if not agentscope_has_chat_models():
        return handle
    from rft_platform.rollout.workflows.agentscope import RecordedChatModel

    return RecordedChatModel(handle)


def framework_models(models: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the ``auxiliary_models`` of user functions: each ``AuxiliaryModel`` as ``framework_model`` returns it.

    Other values are passed on unchanged. Empty if there are no models.
    """
    return {
        name: framework_model(model) if isinstance(model, AuxiliaryModel) else model
        for name, model in (models or {}).items()
    }


@lru_cache(maxsize=1)
def agentscope_has_chat_models() -> bool:
    """Whether AgentScope 1.x is installed, whose agents take a chat model with a replaceable client."""
    if importlib.util.find_spec("agentscope") is None:
        return False
    return importlib.metadata.version("agentscope").startswith("1.")
