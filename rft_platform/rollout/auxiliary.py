"""Auxiliary models: further models that workflows and judges may ask. Served somewhere, never trained, never recorded.

Importing this module does not import ``openai``; asking a model for a client does.
"""

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rft_platform.errors import UserError
from rft_platform.inference.serving.api_keys import NO_KEY
from rft_platform.redaction import hide
from rft_platform.rollout.one_chat import one_chat

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True, slots=True)
class AuxiliarySpec:
    """Where a model is served and how it may be asked; plain JSON values.

    Of the keys only those of the platform's own engines are in it, which live no longer than their engine.
    """

    name: str  # by which workflows and judges know it
    model: str  # what a request names as ``model``
    base_url: str  # root of an OpenAI-compatible API, usually ending in /v1
    api_key_env: str | None = None  # the environment variable with the key; None: the endpoint asks for none
    timeout_s: float = 300.0  # of one attempt
    max_concurrency: int = 16  # requests at once, from one process
    other_urls: tuple[str, ...] = ()  # further replicas: requests go round all of them
    defaults: dict[str, Any] = field(default_factory=dict)  # fields of a chat request that the caller does not name
    engine_keys: tuple[str, ...] = field(default=(), repr=False)  # of an engine of ours: one for each URL
    identity: str = ""  # what its answers depend on, in kept answers' keys; empty: model, base_url and defaults

    def to_json(self) -> dict[str, Any]:
        """The specification as plain JSON values; ``from_json`` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "AuxiliarySpec":
        """Read what ``to_json`` wrote."""
        return cls(**{**value, **{name: tuple(value.get(name, ())) for name in ("other_urls", "engine_keys")}})

    def api_key(self) -> str:
        """The secret, from the environment; raises UserError, which names the variable, where that is not set."""
        if self.api_key_env is None:
            return self.engine_keys[0] if self.engine_keys else NO_KEY
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise UserError(
                f"auxiliary model {self.name!r}: the environment variable {self.api_key_env} is not set; export the "
                f"key of {self.base_url} in it (every process that runs workflows or judges needs it)"
            )
        if self.api_key_env is not None:
            hide(key)
        return key


class AuxiliaryModel:
    """One model, ready to be asked from any thread or event loop. What its clients are asked is not recorded."""

    def __init__(self, spec: AuxiliarySpec) -> None:
        """Raises UserError where the key that ``spec`` names is not in the environment."""
        self.spec = spec
        self.name = spec.name
        self._key = spec.api_key()
        self._making = threading.Lock()  # or every thread that comes first would have a client, and slots, of its own
        self._async: openai.AsyncOpenAI | None = None
        self._sync: openai.OpenAI | None = None

    def __repr__(self) -> str:
        return f"AuxiliaryModel({self.name!r}, {self.model_name!r} at {self.spec.base_url})"

    @property
    def model_name(self) -> str:
        """What to give as ``model`` in a request."""
        return self.spec.model

    @property
    def identity(self) -> str:
        """What tells its answers from those of another model, or of the same one asked otherwise."""
        asked = f" {json.dumps(self.spec.defaults, sort_keys=True)}" if self.spec.defaults else ""
        return self.spec.identity or f"{self.spec.model} at {self.spec.base_url}{asked}"

    def get_openai_async_client(self) -> "openai.AsyncOpenAI":
        """An ``openai.AsyncOpenAI`` with its usual retries; the same one until somebody closes it."""
        from rft_platform.rollout.auxiliary_clients import async_client

        with self._making:
            if self._async is None or self._async.is_closed():
                self._async = async_client(self.spec, self._key)
            return self._async

    def get_openai_client(self) -> "openai.OpenAI":
        """An ``openai.OpenAI``, likewise. It blocks: use it from a thread."""
        from rft_platform.rollout.auxiliary_clients import sync_client

        with self._making:
            if self._sync is None or self._sync.is_closed():
                self._sync = sync_client(self.spec, self._key)
            return self._sync

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """The assistant's message that continues ``messages``, in wire format; raises what ``openai`` raises."""
        return await one_chat(self, messages, tools, arguments)

    async def aclose(self) -> None:
        """Close the clients; asked again, the model makes new ones."""
        if self._async is not None:
            await self._async.close()
        self.close()

    def close(self) -> None:
        """The same without an event loop: no connection of the other client outlives its request."""
        if self._sync is not None:
            self._sync.close()


def handed_out(models: Mapping[str, Any] | None) -> dict[str, Any]:
    """What user functions get as ``auxiliary_models``: AgentScope chat models where AgentScope is installed.

    What is not an ``AuxiliaryModel`` is handed out as it is. An empty dict where there are none.
    """
    from rft_platform.rollout.chat_models import framework_model

    wrap: Any = framework_model  # of whatever has clients and a model name
    given = dict(models or {})
    return {name: wrap(model) if isinstance(model, AuxiliaryModel) else model for name, model in given.items()}
