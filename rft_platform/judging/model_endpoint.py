"""The judge model: an auxiliary model of the project by its name, or any OpenAI endpoint."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from rft_platform.common.errors import UserError
from rft_platform.common.redaction import hide
from rft_platform.judging.inert_text import control_tokens

if TYPE_CHECKING:
    import openai


class EndpointSettings(BaseModel):
    """An OpenAI endpoint in the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    model: str
    api_key_env: str | None = None
    """The environment variable with the key; null: no key needed."""

    def api_key(self) -> str:
        """Return the key, or a placeholder if none is needed. Raises UserError if the variable is not set."""
        key = "EMPTY" if self.api_key_env is None else os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise UserError(
                f"the judge's model {self.model!r}: the environment variable {self.api_key_env} is not set; export "
                f"the key of {self.base_url} in it"
            )
        if self.api_key_env is not None:
            hide(key)
        return key


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer and the tokens that it used."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model to ask."""

    identity: str  # part of the key of stored answers: model, address and default parameters
    model: str
    client: "openai.AsyncOpenAI"
    owned: bool  # whether the judge context closes the client

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Control tokens of the model's chat template, if its tokenizer is on this machine."""
        return control_tokens(self.model)

    async def ask(self, messages: list[dict[str, str]], params: Mapping[str, Any], timeout_s: float) -> Reply:
        """Make one attempt; raises what ``openai`` raises."""
        create: Any = self.client.chat.completions.create
        answer = await create(model=self.model, messages=messages, timeout=timeout_s, **params)
        usage = answer.usage
        text = answer.choices[0].message.content if answer.choices else None
        return Reply(text or "", 0 if usage is None else usage.total_tokens)


def open_endpoint(model: str | EndpointSettings, auxiliary_models: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint that ``model`` names. Raises UserError for an unknown name or a missing key.

    An auxiliary model is any object with ``model_name`` and an ``openai.AsyncOpenAI``, such as ``AuxiliaryModel`` or a
    chat model of AgentScope.
    """
    if isinstance(model, EndpointSettings):
        return _own(model)
    if model not in auxiliary_models:
        raise UserError(
            f"the judge's model {model!r} is not an auxiliary model; explorer.auxiliary_models has "
            f"{sorted(auxiliary_models) or 'none'}: add it there, or give model as {{base_url, model, api_key_env}}"
        )
    found = auxiliary_models[model]
    client = found.get_openai_async_client() if hasattr(found, "get_openai_async_client") else found.client
    identity = getattr(found, "identity", None) or f"{found.model_name} at {client.base_url}"
    return Endpoint(identity, found.model_name, client.with_options(max_retries=0), owned=False)


def _own(settings: EndpointSettings) -> Endpoint:
    import openai

    client = openai.AsyncOpenAI(base_url=settings.base_url, api_key=settings.api_key(), max_retries=0)
    return Endpoint(f"{settings.model} at {settings.base_url}", settings.model, client, owned=True)
