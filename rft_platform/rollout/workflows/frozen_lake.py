"""A built-in workflow with an environment: the model walks over a frozen lake to a goal and avoids holes."""

import random
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.tasks.enclosed_text import last_enclosed
from rft_platform.tasks.task import Task

Cell = tuple[int, int]  # row, column

MOVES: Mapping[str, Cell] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_BESIDE = {"left": ("up", "down"), "right": ("up", "down"), "up": ("left", "right"), "down": ("left", "right")}
_MARK = re.compile("```")
_TRIES = 10_000  # random lakes until one has a short enough way

SYSTEM_PROMPT = """You walk on a frozen lake, drawn as a grid: P is you, G the goal, O a hole and _ ice. You win when \
you stand on G, and lose when you step on O. You cannot leave the grid.

In each turn, think about your next step, and then write exactly one move between triple backticks: ```Left```, \
```Right```, ```Up``` or ```Down```."""


@dataclass(frozen=True, slots=True)
class Lake:
    """A square lake: the cells with holes, the start and the goal."""

    size: int
    holes: frozenset[Cell]
    start: Cell
    goal: Cell

    @classmethod
    def generate(cls, size: int, ice: float, seed: int, max_moves: int) -> "Lake":
        """A random lake whose goal can be reached in at most ``max_moves`` moves; ``ice`` is the share of ice.

        Raises ValueError if none was found.
        """
        generator = random.Random(seed)
        cells = [(row, column) for row in range(size) for column in range(size)]
        for _ in range(_TRIES if size > 1 else 0):
            start, goal = generator.sample(cells, 2)
            holes = frozenset(cell for cell in cells if generator.random() >= ice and cell not in (start, goal))
            lake = cls(size, holes, start, goal)
            if lake.distance() <= max_moves:
                return lake
        raise ValueError(
            f"no lake of size {size} with ice {ice} has a way of at most {max_moves} moves: change the row"
        )

    def distance(self) -> float:
        """Moves of the shortest way from start to goal; infinite if there is none."""
        queue, seen = deque([(self.start, 0)]), {self.start}
        while queue:
            cell, moves = queue.popleft()
            if cell == self.goal:
                return moves
            for name in MOVES:
                following = self.after(cell, name)
                if following not in seen and following not in self.holes:
                    seen.add(following)
                    queue.append((following, moves + 1))
        return float("inf")

    def after(self, cell: Cell, move: str) -> Cell:
        """The cell after a move. If the move would leave the lake, this is the current cell."""
        row, column = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
        return (row, column) if 0 <= row < self.size and 0 <= column < self.size else cell

    def drawn(self, player: Cell) -> str:
        """The grid as text, with the player."""
        marks = {**dict.fromkeys(self.holes, "O"), self.goal: "G", player: "P"}
        return "\n".join(
            " ".join(marks.get((row, column), "_") for column in range(self.size)) for row in range(self.size)
        )


def parse_move(text: str) -> str | None:
    """The move between the last triple backticks of an answer; None if there is no valid one."""
    move = (last_enclosed(text, _MARK, _MARK) or "").strip().lower()
    return move if move in MOVES else None


@dataclass(frozen=True, slots=True)
class FrozenLakeWorkflow:
    """Let the model move until it reaches the goal (reward 1), falls into a hole or has no step left (reward 0).

    A row has ``size``, ``p`` (the share of ice) and ``seed`` of its lake. ``max_steps`` limits model calls and
    ``max_moves`` the moves. ``is_slippery``: a move goes in its direction or to one of its sides, each with the same
    probability.
    """

    max_steps: int = 10
    max_moves: int = 8
    is_slippery: bool = False
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.max_steps < 1 or self.max_moves < 1:
            raise UserError(
                f"workflow frozen_lake: max_steps {self.max_steps}, max_moves {self.max_moves}: expected 1 or more"
            )

    async def run(
        self, task: Task, model: ModelHandle, auxiliary_models: Mapping[str, Any] | None = None
    ) -> WorkflowOutput:
        """Return the reward, and the final grid as the response. Metrics: steps, moves, success, invalid_moves."""
        seed = int(task.raw.get("seed", 42))
        lake = Lake.generate(int(task.raw.get("size", 4)), float(task.raw.get("p", 0.8)), seed, self.max_moves)
        slips = random.Random(seed + 1)
        player, moves, steps, invalid, note = lake.start, 0, 0, 0, ""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system_prompt or SYSTEM_PROMPT}]
        while player != lake.goal and player not in lake.holes and steps < self.max_steps and moves < self.max_moves:
            model.set_env_state([lake.drawn(player), sorted(lake.holes)])
            left = f"You have {self.max_steps - steps} turns left."
            messages.append({"role": "user", "content": f"{note}{lake.drawn(player)}\n\n{left}"})
            answer = await model.chat(messages)
            messages.append({"role": "assistant", "content": answer.get("content") or ""})
            steps += 1
            move = parse_move(messages[-1]["content"])
            if move is None:
                invalid += 1
                note = "Your answer had no valid move between triple backticks, so you did not move.\n\n"
                continue
            taken = slips.choice((move, *_BESIDE[move])) if self.is_slippery else move
            before, player, moves = player, lake.after(player, taken), moves + 1
            note = "You did not move.\n\n" if player == before else ""
        success = float(player == lake.goal)
        metrics = {"steps": float(steps), "moves": float(moves), "success": success, "invalid_moves": float(invalid)}
        return WorkflowOutput(reward=success, response=lake.drawn(player), metrics=metrics)
