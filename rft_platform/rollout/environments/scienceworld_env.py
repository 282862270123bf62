"""Episodes of ScienceWorld, a text game about experiments at school; each runs in a separate Java process."""

import asyncio
import shutil
from collections.abc import Mapping
from typing import Any, Literal

from rft_platform.common.errors import UserError
from rft_platform.rollout.environments.interface import Action, ToolCall, Turn

_UNKNOWN = "No known action matches that input."


class ScienceWorldEnvironment:
    """An episode of a task of ScienceWorld, such as ``boil``. The answer's text is the action.

    Args:
        split: ScienceWorld's own split of the task's variations; the row's ``seed`` chooses one of them.
        simplifications: as ScienceWorld names them, such as ``easy``.
        max_moves: moves after which ScienceWorld ends the episode.
    """

    def __init__(
        self,
        task: str,
        *,
        split: Literal["train", "dev", "test"] = "train",
        simplifications: str = "",
        max_moves: int = 100,
    ) -> None:
        try:
            import scienceworld
        except ImportError:
            raise UserError(
                f"environment scienceworld:{task} needs the package scienceworld (pip install "
                "'rft-platform[scienceworld]') and Java"
            ) from None
        if shutil.which("java") is None:
            raise UserError(f"environment scienceworld:{task} needs Java: there is no program java on the PATH")
        if split not in ("train", "dev", "test"):
            raise UserError(f"environment scienceworld:{task}: split {split!r} given, expected train, dev or test")
        self._package, self._task, self._split = scienceworld, task, split
        self._simplifications, self._max_moves = simplifications, max_moves
        self._env: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Turn:
        """Start Java and the variation that the row's ``seed`` (0) chooses; the observation begins with the task."""
        return await asyncio.to_thread(self._start, int(row.get("seed") or 0))

    def _start(self, seed: int) -> Turn:
        self._env = self._package.ScienceWorldEnv("", envStepLimit=self._max_moves)
        if self._task not in (known := self._env.get_task_names()):
            raise UserError(f"environment scienceworld:{self._task}: unknown task; expected one of {', '.join(known)}")
        self._env.load(self._task, 0, "")
        variations = list(getattr(self._env, f"get_variations_{self._split}")())
        self._env.load(self._task, variations[seed % len(variations)], self._simplifications)
        observation, _ = self._env.reset()
        return Turn(f"{self._env.get_task_description()}\n\n{observation}")

    async def step(self, action: Action) -> Turn:
        """Take the last line of the text as the action; the reward is the change of the score, as a share of 100."""
        assert not isinstance(action, ToolCall), "there are no tools"
        line = (action.strip().splitlines() or [""])[-1]
        observation, points, done, info = await asyncio.to_thread(self._env.step, line)
        metrics = {"score": float(info["score"])}
        return Turn(str(observation), points / 100, bool(done), valid=observation != _UNKNOWN, metrics=metrics)

    async def close(self) -> None:
        """End the Java process."""
        if self._env is not None:
            await asyncio.to_thread(self._env.close)
