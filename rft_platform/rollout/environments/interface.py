"""The interface of environments, and what goes in and comes out at each turn."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model: the tool's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


Action = str | ToolCall
"""The text of the model's answer, or one of its tool calls."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment answers to a reset or an action."""

    observation: str  # for the model
    reward: float = 0.0  # of the action; 0 after a reset
    done: bool = False  # the episode has ended
    valid: bool = True  # False: the action was not understood and changed nothing
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the episode so far
    state: Any = None  # for ``set_env_state``, where equal states have different observations; None: the observation


class Environment(Protocol):
    """One episode. Every run makes a new object, resets it once, and closes it, also after an error.

    ``__init__`` must be cheap and must not need closing, because the check of the configuration makes an object too.
    An error that an implementation raises fails the run's attempt, which is retried as other attempts are.
    An implementation may have an attribute ``tools``: the tools in OpenAI's format, read once after ``reset``. If it is
    empty or missing, the text of an answer is the action.
    """

    async def reset(self, row: Mapping[str, Any]) -> Turn:
        """Start the episode of a task's row (for instance with its ``seed``)."""
        ...

    async def step(self, action: Action) -> Turn:
        """Apply an action."""
        ...

    async def close(self) -> None:
        """Release what the episode holds. Called once, after the last turn or an error."""
        ...
