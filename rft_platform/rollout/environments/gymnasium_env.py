"""Environments of the package Gymnasium with text or numbered actions, played as text.

The observation is what ``render_mode="ansi"`` draws if the environment has it, else its observation as text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.threads import call_in_thread
from rft_platform.rollout.environments.interface import Action, ToolCall, Turn

_COLOURS = re.compile(r"\x1b\[(\d+;?)*m")  # ansi renderings mark the player by a background
_ACTION = re.compile(r"^ *\([A-Za-z ]+\) *$\n?", re.MULTILINE)  # the line of a rendering that names the last action
_MARKED = re.compile(r"\x1b\[41m(.)\x1b\[0m")


class GymnasiumEnvironment:
    """An environment of Gymnasium. ``actions`` names the numbered actions, in order; default: the numbers themselves.

    The last action that an answer names is taken; of several that begin at one place, the longest. Further options go
    to ``gymnasium.make``. Raises UserError if the package or the environment is missing, or its actions are neither
    ``Discrete`` nor ``Text``.
    """

    def __init__(self, name: str, *, actions: Sequence[str] = (), **options: Any) -> None:
        self._env = _make(name, options)
        space = self._env.action_space
        self._start = int(getattr(space, "start", 0))
        self._names: list[str] | None = None
        self._named = re.compile("")
        if type(space).__name__ == "Discrete":
            count = int(space.n)
            self._names = [str(each).lower() for each in actions or range(self._start, self._start + count)]
            if len(set(self._names)) != count or not all(map(str.strip, self._names)):
                raise UserError(f"environment gymnasium:{name}: actions {list(actions)} given, expected {count} names")
            longest_first = "|".join(map(re.escape, sorted(self._names, key=len, reverse=True)))
            self._named = re.compile(rf"(?<![\w-])(?:{longest_first})(?![\w-])")
        elif type(space).__name__ != "Text":
            raise UserError(f"environment gymnasium:{name}: its actions are {space}, expected Discrete or Text")

    async def reset(self, row: Mapping[str, Any]) -> Turn:
        """Start with the row's ``seed``, a whole number; without one the start is random."""
        seed = row.get("seed")
        observation, _ = await call_in_thread(self._env.reset, {"seed": None if seed is None else int(seed)})
        return self._turn(observation)

    async def step(self, action: Action) -> Turn:
        """Take the last action that the text names; an answer without one changes nothing."""
        text = action.name if isinstance(action, ToolCall) else action
        chosen: Any = text
        if self._names is not None:
            found = self._named.findall(text.lower())
            if not found:
                return Turn(f"No valid action. Choose one of: {', '.join(self._names)}.", valid=False)
            chosen = self._start + self._names.index(found[-1])
        observation, reward, terminated, truncated, _ = await call_in_thread(self._env.step, {"action": chosen})
        return self._turn(observation, float(reward), bool(terminated or truncated))

    async def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _turn(self, observation: Any, reward: float = 0.0, done: bool = False) -> Turn:
        if self._env.render_mode != "ansi":
            return Turn(str(observation), reward, done)
        drawn = _COLOURS.sub("", _MARKED.sub(r"[\1]", str(self._env.render())))
        return Turn(drawn.strip(), reward, done, state=_ACTION.sub("", drawn).strip())


def _make(name: str, options: Mapping[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError:
        raise UserError(
            f"environment gymnasium:{name} needs the package gymnasium: pip install 'rft-platform[gymnasium]'"
        ) from None
    try:
        mode = {"render_mode": "ansi"} if "ansi" in _render_modes(gymnasium, name) else {}
        return gymnasium.make(name, **mode, **options)
    except (gymnasium.error.Error, TypeError, ValueError) as error:
        raise UserError(f"environment gymnasium:{name} with {dict(options)}: {error}") from None


def _render_modes(gymnasium: Any, name: str) -> Sequence[str]:
    from importlib import import_module

    entry = gymnasium.spec(name).entry_point
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(import_module(module), attribute)
    modes: Sequence[str] = getattr(entry, "metadata", {}).get("render_modes", ())
    return modes
