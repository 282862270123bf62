"""``ModelHandle``, the ``model`` argument of a workflow: calls the policy and records every call of the run."""

from typing import TYPE_CHECKING, Any

from rft_platform.errors import UserCodeError
from rft_platform.rollout.env_state import state_hash
from rft_platform.rollout.history import RecordedCall, RunHistory
from rft_platform.rollout.one_chat import one_chat

if TYPE_CHECKING:
    import openai

    from rft_platform.rollout.recording import RecordingClients


class ModelHandle:
    """The policy as one run sees it. Handles of different runs share no state."""

    def __init__(self, clients: "RecordingClients", history: RunHistory, first: "ModelHandle | None" = None) -> None:
        """``first``: the run's own handle, if this handle is for a further policy."""
        self._clients = clients
        self._history = history
        self._first = first
        self._policy: str | None = None
        self._async: openai.AsyncOpenAI | None = None
        self._sync: openai.OpenAI | None = None
        self.model_path = history.model

    @property
    def model_name(self) -> str:
        """Value of ``model`` in a request."""
        return self._policy or self.model_path

    def policy(self, name: str) -> "ModelHandle":
        """Return a handle for another trainable policy of the run, by its name in section ``policies``.

        Its calls are recorded into this run, in any order. Raises UserCodeError for an unknown name.
        """
        road = self._history.policies.get(name)
        if road is None:
            known = ", ".join(self._history.policies) or "none"
            raise UserCodeError(f"model.policy({name!r}): no such policy; further policies of this run are: {known}")
        handle = ModelHandle(self._clients, self._history, self._first or self)
        handle._policy, handle.model_path = name, road.model
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
        """Return an ``openai.AsyncOpenAI`` for any agent framework; the same object until it is closed."""
        if self._first is not None:
            return self._first.get_openai_async_client()
        if self._async is None or self._async.is_closed():
            self._async = self._clients.async_client(self._history)
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
        """Return the assistant message that continues ``messages``, in wire format, ready to be appended to them."""
        return await one_chat(self, messages, tools, arguments)

    def set_env_state(self, state: Any) -> None:
        """Set the environment state that the next calls of this run respond to: text, bytes or a JSON value.

        The advantage ``gigpo`` compares steps with equal states among the runs of a task. Only a digest is stored.
        """
        self._history.env_state_hash = state_hash(state)

    def give_step_reward(self, value: float) -> None:
        """Give a step reward to this policy's last model call; several for one call add up.

        A run whose workflow returns no reward gets the sum of its step rewards. Step-level advantages (``gae``,
        ``reinforce_plus_plus``, ``gigpo``) use each reward at its own step. Raises UserCodeError before the first call.
        """
        self._history.give_step_reward(value, self._policy)

    def extract_experience_from_history(self, clear_history: bool = True) -> list[RecordedCall]:
        """Return the calls recorded since the last clearing extraction; their ``reward`` and ``metrics`` may be set."""
        return self._history.extract(clear_history)

    async def aclose(self) -> None:
        """Close the connections of the run, also for code that it left running."""
        self._clients.end(self._history)
        if self._async is not None:
            await self._async.close()
        if self._sync is not None:
            self._sync.close()
