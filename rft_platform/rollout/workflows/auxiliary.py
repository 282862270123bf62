"""Auxiliary models: served models that workflows and judges may call; they are neither trained nor recorded.

Importing this module does not import ``openai``; creating a client does.
"""

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserError
from rft_platform.common.redaction import hide
from rft_platform.inference.http_contract import NO_KEY
from rft_platform.rollout.recording.model_handle import chat_once

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True, slots=True)
class AuxiliarySpec:
    """Where a model is served and how to call it; plain JSON values.

    The only API keys in it are those of the platform's own engines; such a key is valid while its engine runs.
    """

    name: str  # the name that workflows and judges use
    model: str  # the ``model`` field of a request
    base_url: str  # root of an OpenAI-compatible API, usually ending in /v1
    api_key_env: str | None = None  # environment variable with the key; None: no key needed
    timeout_s: float = 300.0  # seconds for one attempt
    max_concurrency: int = 16  # concurrent requests: in each event loop, and in all threads together
    other_urls: tuple[str, ...] = ()  # further replicas, used in turn
    defaults: dict[str, Any] = field(default_factory=dict)  # values of chat request fields that the caller omits
    engine_keys: tuple[str, ...] = field(default=(), repr=False)  # API keys of the platform's engines, one for each URL
    identity: str = ""  # part of the key of stored answers; empty: model, base_url and defaults

    def to_json(self) -> dict[str, Any]:
        """The specification as plain JSON values; ``from_json`` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "AuxiliarySpec":
        """Read what ``to_json`` wrote."""
        return cls(**{**value, **{name: tuple(value.get(name, ())) for name in ("other_urls", "engine_keys")}})

    def api_key(self) -> str:
        """Return the API key. Raises UserError if the environment variable with the key is not set."""
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
    """One auxiliary model, usable from any thread or event loop. Its calls are not recorded."""

    def __init__(self, spec: AuxiliarySpec) -> None:
        """Raises UserError if the environment variable that ``spec`` names for the API key is not set."""
        self.spec = spec
        self.name = spec.name
        self._key = spec.api_key()
        self._creating = threading.Lock()  # else each concurrent first caller would get its own client and slots
        self._async: openai.AsyncOpenAI | None = None
        self._sync: openai.OpenAI | None = None

    def __repr__(self) -> str:
        return f"AuxiliaryModel({self.name!r}, {self.model_name!r} at {self.spec.base_url})"

    @property
    def model_name(self) -> str:
        """Value of ``model`` in a request."""
        return self.spec.model

    @property
    def identity(self) -> str:
        """Part of the key of stored answers; differs between models, and between different defaults of one model."""
        defaults = f" {json.dumps(self.spec.defaults, sort_keys=True)}" if self.spec.defaults else ""
        return self.spec.identity or f"{self.spec.model} at {self.spec.base_url}{defaults}"

    def get_openai_async_client(self) -> "openai.AsyncOpenAI":
        """Return an ``openai.AsyncOpenAI`` with its usual retries; the same object until it is closed."""
        from rft_platform.rollout.workflows.auxiliary_clients import async_client

        with self._creating:
            if self._async is None or self._async.is_closed():
                self._async = async_client(self.spec, self._key)
            return self._async

    def get_openai_client(self) -> "openai.OpenAI":
        """Return the blocking ``openai.OpenAI``; use it from a thread. The same object until it is closed."""
        from rft_platform.rollout.workflows.auxiliary_clients import sync_client

        with self._creating:
            if self._sync is None or self._sync.is_closed():
                self._sync = sync_client(self.spec, self._key)
            return self._sync

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Return the assistant message that continues ``messages``, in the API format; raises errors of ``openai``."""
        return await chat_once(self, messages, tools, arguments)

    async def aclose(self) -> None:
        """Close the clients; a later call creates new ones."""
        if self._async is not None:
            await self._async.close()
        self.close()

    def close(self) -> None:
        """Close only the blocking client; the async client keeps no connections between requests."""
        if self._sync is not None:
            self._sync.close()
