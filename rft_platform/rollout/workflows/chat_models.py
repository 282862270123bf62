"""Wrap models as chat models of an agent framework, for workflow and judge functions."""

import importlib
import importlib.metadata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel

_HANDLE = "_handle"
#: Major version of AgentScope -> module with its chat model.
_ADAPTERS = {"1": "agentscope", "2": "agentscope2"}


class DelegatesToHandle:
    """Base of chat models that wrap a handle: attributes that the chat model lacks are those of the handle.

    The handle is a run's ``ModelHandle``, whose calls are recorded, or an ``AuxiliaryModel``, whose calls are not. A
    call without sampling parameters gets those of the taskset or of the model's configuration.
    """

    _handle: Any

    def policy(self, name: str) -> Any:
        """Return the chat model of another trainable policy of the run."""
        return type(self)(self._handle.policy(name))  # type: ignore[call-arg]  # the subclasses take a handle

    def __getattr__(self, name: str) -> Any:
        if name == _HANDLE:  # the handle is not set yet; without this line the lookup would recurse
            raise AttributeError(name)
        return getattr(self._handle, name)


def framework_model(handle: Any) -> Any:
    """Return ``handle`` as AgentScope's ``OpenAIChatModel`` where AgentScope 1 or 2 is installed, else ``handle``.

    Both results have every method of the handle (a ``ModelHandle`` or an ``AuxiliaryModel``) and call the model with
    the handle's clients.
    """
    module = _ADAPTERS.get((agentscope_version() or "").partition(".")[0])
    if module is None:
        return handle
    return importlib.import_module(f"rft_platform.rollout.workflows.{module}").RecordedChatModel(handle)


def framework_models(models: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the ``auxiliary_models`` of user functions: each ``AuxiliaryModel`` as ``framework_model`` returns it.

    Other values are passed on unchanged. Empty if there are no models.
    """
    return {
        name: framework_model(model) if isinstance(model, AuxiliaryModel) else model
        for name, model in (models or {}).items()
    }


@lru_cache(maxsize=1)
def agentscope_version() -> str | None:
    """The version of the installed AgentScope; None if there is none."""
    try:
        return importlib.metadata.version("agentscope")
    except importlib.metadata.PackageNotFoundError:  # also where a folder on the path has this name
        return None


@lru_cache(maxsize=1)
def unused_connections() -> Any:
    """One HTTP client for all OpenAI clients that AgentScope creates and the platform replaces.

    It is shared because creating one reads the certificates, which takes 30 ms.
    """
    import openai

    return openai.DefaultAsyncHttpxClient()
