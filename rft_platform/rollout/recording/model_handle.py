"""``ModelHandle``, the ``model`` argument of a workflow: calls the policy and records every call of the run."""

import asyncio
import hashlib
import json
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserCodeError
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.record import ModelCall
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.history import RunHistory

if TYPE_CHECKING:
    import openai

    from rft_platform.rollout.recording.clients import RecordingClients


class ModelHandle:
    """The policy as one run sees it. Handles of different runs share no state."""

    def __init__(
        self,
        clients: "RecordingClients",
        history: RunHistory,
        first: "ModelHandle | None" = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """``first``: the handle of the run's first policy, if this handle is for a further policy.

        ``loop``: the run's event loop; without it the asynchronous client works in one event loop only.
        """
        self._clients = clients
        self._history = history
        self._first = first
        self._loop = loop
        self._policy = DEFAULT_POLICY
        self._async: openai.AsyncOpenAI | None = None
        self._sync: openai.OpenAI | None = None
        self.model_path = history.model

    @property
    def model_name(self) -> str:
        """Value of ``model`` in a request."""
        return self.model_path if self._policy == DEFAULT_POLICY else self._policy

    def policy(self, name: str) -> "ModelHandle":
        """Return a handle for another trainable policy of the run, by its name in section ``policies``.

        Calls of all policies are recorded into the run and may alternate. Raises UserCodeError for an unknown name.
        """
        route = self._history.policies.get(name)
        if route is None:
            known = ", ".join(self._history.policies) or "none"
            raise UserCodeError(f"model.policy({name!r}): no such policy; further policies of this run are: {known}")
        handle = ModelHandle(self._clients, self._history, self._first or self)
        handle._policy, handle.model_path = name, route.model
        return handle

    @property
    def base_url(self) -> str:
        """Root of the OpenAI API, ending in /v1, for an agent in another process, in any language.

        Calls with ``api_key`` as the key are recorded into this run, like those of the clients below.
        """
        return self._clients.gateway.base_url

    @property
    def api_key(self) -> str:
        """The key of this run, ``<batch>/<task>/<run>.<secret>``. It is refused once the run has ended."""
        return self._clients.gateway.register(self._history)

    def get_openai_async_client(self) -> "openai.AsyncOpenAI":
        """Return an ``openai.AsyncOpenAI`` for any agent framework and event loop; the same object until closed."""
        if self._first is not None:
            return self._first.get_openai_async_client()
        if self._async is None or self._async.is_closed():
            self._async = self._clients.async_client(self._history, self._loop)
        return self._async

    def get_openai_client(self) -> "openai.OpenAI":
        """Return a blocking ``openai.OpenAI``, the same until closed; use it in a thread (``asyncio.to_thread``)."""
        if self._first is not None:
            return self._first.get_openai_client()
        if self._sync is None or self._sync.is_closed():
            self._sync = self._clients.sync_client(self._history)
        return self._sync

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Return the assistant message that continues ``messages``, in the API's format, ready to be appended."""
        return await chat_once(self.get_openai_async_client(), self.model_name, messages, tools, arguments)

    def set_env_state(self, state: Any) -> None:
        """Set the environment state that the next calls of this run respond to: text, bytes or a JSON value.

        The advantage ``gigpo`` compares steps with equal states among the runs of a task. Only a digest is stored.
        """
        self._history.set_env_state(state_hash(state))

    def give_step_reward(self, value: float) -> None:
        """Give a step reward to this policy's last model call in this branch; several for one call add up.

        A run whose workflow returns no reward gets the sum of its step rewards. Step-level advantages (``gae``,
        ``reinforce_plus_plus``, ``gigpo``) use each reward at its own step. Raises UserCodeError before the first call.
        """
        self._history.give_step_reward(value, self._policy)

    def extract_experience_from_history(self, clear_history: bool = True) -> list[ModelCall]:
        """Return the calls recorded since the last clearing extraction; their ``reward`` and ``metrics`` may be set."""
        return self._history.extract(clear_history)

    def recorded_calls(self) -> list[ModelCall]:
        """Return all recorded calls of the run, in the order in which they were sent."""
        return self._history.calls()

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of calls that set none."""
        return self._history.sampling

    async def aclose(self) -> None:
        """Close the connections of the run, also those that code of the run still uses."""
        self._clients.end(self._history)
        if self._async is not None:
            await self._async.close()
        if self._sync is not None:
            self._sync.close()


async def chat_once(
    client: Any,
    model: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Make one chat completion with ``client``, an ``openai.AsyncOpenAI``, and raise what it raises.

    Returns the assistant message in the API's format.
    """
    options = {**arguments, "tools": tools} if tools else arguments
    answer = await client.chat.completions.create(model=model, messages=messages, **options)
    message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
    return message


def state_hash(state: Any) -> str | None:
    """Return a digest of text, bytes or a JSON value, the same for equal states; None (unknown state) stays None.

    Raises UserCodeError for other types: their text does not show whether two values are equal.
    """
    if state is None:
        return None
    if not isinstance(state, bytes):
        try:
            state = json.dumps(state, sort_keys=True, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise UserCodeError(
                f"set_env_state was given {type(state).__name__}: {error}; give text, bytes or a JSON value"
            ) from error
    return hashlib.sha256(state).hexdigest()[:32]
