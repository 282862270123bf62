"""A client of OpenEnv servers: one WebSocket session for each episode, messages as JSON.

The protocol is that of openenv-core 0.3: ``reset`` and ``step`` are answered by an ``observation`` with observation,
reward and done, ``close`` ends the session, and an ``error`` has a message.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.rollout.environments.interface import Action, ToolCall, Turn


class OpenEnvEnvironment:
    """An episode on the server at ``url`` (http or ws).

    Args:
        action_key: key of the action that gets the text of an answer.
        observation_key: key of the observation that the model sees; None: the whole observation as JSON.
        reset: further arguments of every reset. Columns ``seed`` and ``reset`` (an object) of the row are added.
        timeout_s: longest wait for the server's answer.
    """

    def __init__(
        self,
        url: str,
        *,
        action_key: str = "message",
        observation_key: str | None = None,
        reset: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UserError(f"environment openenv:{url}: expected the address of a server, as in http://127.0.0.1:8000")
        self._url = "ws" + url.removeprefix("http").removeprefix("ws").rstrip("/") + "/ws"
        self._action_key, self._observation_key = action_key, observation_key
        self._reset, self._timeout_s = dict(reset or {}), timeout_s
        self._socket: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Turn:
        """Connect and start an episode."""
        self._socket = await self._connect()
        seed = {} if row.get("seed") is None else {"seed": int(row["seed"])}
        return await self._ask("reset", {**self._reset, **seed, **dict(row.get("reset") or {})})

    async def step(self, action: Action) -> Turn:
        """Send an action: the text under ``action_key``, or the arguments of a tool call."""
        given = dict(action.arguments) if isinstance(action, ToolCall) else {self._action_key: action}
        return await self._ask("step", given)

    async def close(self) -> None:
        """End the session; a server that is gone is no error."""
        if self._socket is None:
            return
        try:
            await self._socket.send(json.dumps({"type": "close"}))
        except OSError:
            pass
        except _websockets().WebSocketException:
            pass
        finally:
            await self._socket.close()

    async def _connect(self) -> Any:
        websockets = _websockets()
        try:
            return await websockets.connect(self._url, open_timeout=self._timeout_s, max_size=2**26, proxy=None)
        except (OSError, TimeoutError, websockets.WebSocketException) as error:
            raise ConnectionError(f"OpenEnv server at {self._url}: no connection ({error}); is it running?") from error

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Turn:
        websockets = _websockets()
        try:
            await self._socket.send(json.dumps({"type": kind, "data": data}))
            async with asyncio.timeout(self._timeout_s):
                answer = json.loads(await self._socket.recv())
        except TimeoutError:
            raise ConnectionError(
                f"OpenEnv server at {self._url}: no answer to {kind} in {self._timeout_s} s"
            ) from None
        except (OSError, websockets.WebSocketException) as error:
            raise ConnectionError(f"OpenEnv server at {self._url}: the session ended at {kind} ({error})") from error
        if answer.get("type") != "observation":
            detail = (answer.get("data") or {}).get("message", answer)
            raise RuntimeError(f"OpenEnv server at {self._url}: {kind} was refused: {detail}")
        return self._turn(answer["data"])

    def _turn(self, data: Mapping[str, Any]) -> Turn:
        observation = data.get("observation")
        if self._observation_key is not None:
            if not isinstance(observation, Mapping) or self._observation_key not in observation:
                known = sorted(observation) if isinstance(observation, Mapping) else observation
                raise RuntimeError(
                    f"OpenEnv server at {self._url}: no {self._observation_key!r} in the observation {known}"
                )
            observation = observation[self._observation_key]
        text = observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        return Turn(text, float(data.get("reward") or 0.0), bool(data.get("done")))


def _websockets() -> Any:
    try:
        import websockets
    except ImportError:
        raise UserError(
            "environments of OpenEnv servers need the package websockets: pip install 'rft-platform[openenv]'"
        ) from None
    return websockets
