"""A worker process on a node of a Ray cluster, which is called as a ``Child`` of this machine is."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rft_platform.cluster import child
from rft_platform.cluster.child import CallError, MachineLostError
from rft_platform.cluster.interface import Worker
from rft_platform.cluster.ray.connection import kill, lost
from rft_platform.cluster.ray.runtime_environment import unbuilt

_LOST = "was lost with its actor or its node"


class RayWorker:
    """A ``Worker``: an actor on any node with room, and the child of the actor."""

    def __init__(
        self, ray: Any, actor: Any, module: str, python: str | None, log: Path, environment: Mapping[str, str]
    ) -> None:
        self._ray, self._actor, self._module = ray, actor, module
        self._python = python
        self._started: Any = actor.start.remote(module, python, str(log), dict(environment))
        self._is_alive, self._was_lost = True, False
        self._node: str | None = None  # once it has started

    @property
    def is_alive(self) -> bool:
        """Whether no call has found the process gone. A node that is lost between two calls is found by the next."""
        return self._is_alive

    def is_lost_with(self, other: Worker) -> bool:
        """Whether a call has found ``other`` lost, and both are on one node. Only its actor may have been lost."""
        return isinstance(other, RayWorker) and other._was_lost and self._node is not None and self._node == other._node

    def kill(self) -> None:
        """Kill the actor, and with it the process and its descendants."""
        if self._is_alive:
            self._is_alive = False
            kill(self._ray, self._actor)

    async def ask_async(
        self,
        function: str,
        *arguments: Any,
        wall_s: float | None = None,
        on_note: Callable[[Any], None] | None = None,
    ) -> Any:
        """``Child.ask_async`` on the actor's node. ``wall_s`` does not count the time until a node has room."""
        try:
            self._node, refused = await self._started
            if refused is not None:
                raise OSError(f"{self._python or 'python'}: {refused}")
            stream = self._actor.ask.options(num_returns="streaming").remote(function, list(arguments), wall_s)
            async for item in stream:
                kind, value = await item
                if kind != "note":
                    return self._result(kind, value)
                if on_note is not None:
                    on_note(value)
        except lost(self._ray):
            pass
        except self._ray.exceptions.RuntimeEnvSetupError as error:
            self.kill()
            raise unbuilt(error) from error
        except BaseException:
            self.kill()
            raise
        self._was_lost = True
        self.kill()
        raise MachineLostError(f"{function} in the process of {self._module}: it {_LOST}", _LOST)

    def _result(self, kind: str, value: Any) -> Any:
        if kind == "value":
            return value
        if kind == "call_error":
            raise CallError(*value)
        self.kill()
        raise getattr(child, kind)(*value)
