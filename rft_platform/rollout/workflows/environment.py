"""A built-in workflow that lets the policy play an episode of an environment, which the configuration names."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.user_code import construct, load_object
from rft_platform.rollout.environments.gymnasium_env import GymnasiumEnvironment
from rft_platform.rollout.environments.interface import Action, Environment, ToolCall, Turn
from rft_platform.rollout.environments.mcp_tools import McpEnvironment
from rft_platform.rollout.environments.openenv_client import OpenEnvEnvironment
from rft_platform.rollout.environments.scienceworld_env import ScienceWorldEnvironment
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.tasks.task import Task


@dataclass(frozen=True, slots=True)
class EnvironmentWorkflow:
    """Play an episode of ``environment``: at most ``max_turns`` answers of the model.

    The reward of a run is the sum of its actions' rewards; each action's reward is also the step reward of its call. An
    episode of tools ends with the first answer that calls none; ``invalid_reward`` is added for an action that the
    environment does not understand.
    """

    environment: str
    environment_args: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 16
    invalid_reward: float = 0.0
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise UserError(f"workflow environment: max_turns {self.max_turns}: expected 1 or more")
        make_environment(self.environment, self.environment_args)  # refuses what cannot be made, before a run

    async def run(
        self, task: Task, model: ModelHandle, auxiliary_models: Mapping[str, Any] | None = None
    ) -> WorkflowOutput:
        """Return the reward and the response: the last observation, or the model's last answer in an episode of tools.

        If the environment ends an episode of tools, the response is the last observation.
        Metrics: turns, invalid_actions, finished (1 if the environment ended the episode), and those of the
        environment.
        """
        environment = make_environment(self.environment, self.environment_args)
        try:
            episode = _Episode(environment, model, await environment.reset(task.raw), self.invalid_reward)
            await episode.play(self._opening(task, episode.turn), self.max_turns)
        finally:
            await environment.close()
        return WorkflowOutput(episode.reward, episode.response(), episode.metrics())

    def _opening(self, task: Task, turn: Turn) -> list[dict[str, Any]]:
        shown = "\n\n".join(text for text in (task.prompt, turn.observation) if text)
        return [*task.system_messages(self.system_prompt), {"role": "user", "content": shown}]


@dataclass(slots=True)
class _Episode:
    """The turns of one run."""

    environment: Environment
    model: ModelHandle
    turn: Turn
    invalid_reward: float
    tools: list[dict[str, Any]] = field(init=False)  # empty: the text of an answer is the action
    reward: float = 0.0
    turns: int = 0
    invalid: int = 0
    answer: str = ""  # text of the last answer
    measured: Mapping[str, float] = field(default_factory=dict)  # metrics of the environment
    state: Any = None  # of the environment after the last valid action

    def __post_init__(self) -> None:
        self.tools = list(getattr(self.environment, "tools", ()))

    async def play(self, messages: list[dict[str, Any]], max_turns: int) -> None:
        """Alternate answers of the model and turns of the environment."""
        self.state = _state(self.turn)
        while not self.turn.done and self.turns < max_turns:
            self.model.set_env_state(self.state)
            answer = await self.model.chat(messages, tools=self.tools or None)
            self.turns += 1
            messages = [*messages, answer]
            self.answer = answer.get("content") or ""
            calls = answer.get("tool_calls") or []
            if self.tools and not calls:
                break
            for call in calls:
                shown = await self._act(_tool_call(call["function"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": shown})
            if not calls:
                messages.append({"role": "user", "content": await self._act(self.answer)})

    async def _act(self, action: Action | None) -> str:
        """Apply an action; return the text for the model."""
        if self.turn.done:  # a further call of the answer that ended the episode
            return "the episode has ended"
        if action is None:
            self.turn = Turn("error: the arguments are no JSON object", valid=False)
        else:
            self.turn = await self.environment.step(action)
        if self.turn.valid:
            self.state = _state(self.turn)
        reward = self.turn.reward + (0.0 if self.turn.valid else self.invalid_reward)
        self.invalid += not self.turn.valid
        self.reward += reward
        self.measured = {**self.measured, **self.turn.metrics}
        self.model.give_step_reward(reward)
        return self.turn.observation

    def response(self) -> str:
        """What a judge reads: the output of a tool is no answer of the model."""
        return self.answer if self.tools and not self.turn.done else self.turn.observation

    def metrics(self) -> dict[str, float]:
        """Metrics of the run."""
        own = {"turns": float(self.turns), "invalid_actions": float(self.invalid), "finished": float(self.turn.done)}
        return {**self.measured, **own}


def _state(turn: Turn) -> Any:
    return turn.observation if turn.state is None else turn.state


def _tool_call(function: Mapping[str, str]) -> ToolCall | None:
    """The call with its arguments; None if they are no JSON object."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return None
    return ToolCall(function["name"], arguments) if isinstance(arguments, dict) else None


GYMNASIUM, MCP, OPENENV, SCIENCEWORLD = "gymnasium:", "mcp:", "openenv:", "scienceworld:"

_OWN_CLASS = (
    "then write a class with reset, step and close, named file.py:Class (docs/environments.md). If its packages "
    "conflict with the platform's, install them in a separate environment and name that in explorer.workers.python"
)
#: Environments that people ask for by these names, and the way to use them.
HOW_TO_USE: Mapping[str, str] = MappingProxyType(
    {
        "alfworld": f"pip install alfworld (a C compiler is needed), get its games by alfworld-download, {_OWN_CLASS}",
        "webshop": "PyPI's package webshop is not the shop: clone github.com/princeton-nlp/WebShop, run its setup.sh "
        f"(Java, a search index, product data), {_OWN_CLASS}",
        "textarena": "use verifiers' taskset textarena (examples/verifiers, with verifiers[ta]); or install it, "
        f"{_OWN_CLASS}",
        "verifiers": "its tasksets have a workflow of their own: examples/verifiers",
        "harbor": "its task folders have a workflow of their own: examples/harbor",
    }
)


def make_environment(name: str, args: Mapping[str, Any]) -> Environment:
    """A new episode of ``gymnasium:ID``, ``mcp:SERVER``, ``openenv:URL``, ``scienceworld:TASK`` or of a class.

    A class is named ``package.module:Class`` or ``file.py:Class``. ``args`` are the keyword arguments. Raises UserError
    if the environment cannot be made of them.
    """
    if name.startswith(GYMNASIUM):
        return _made(name, GymnasiumEnvironment, (name.removeprefix(GYMNASIUM),), args)
    if name.startswith(MCP):
        return _made(name, McpEnvironment, (name.removeprefix(MCP),), args)
    if name.startswith(OPENENV):
        return _made(name, OpenEnvEnvironment, (name.removeprefix(OPENENV),), args)
    if name.startswith(SCIENCEWORLD):
        return _made(name, ScienceWorldEnvironment, (name.removeprefix(SCIENCEWORLD),), args)
    if (advice := HOW_TO_USE.get(name.partition(":")[0].lower())) is not None:
        raise UserError(f"environment {name!r} is not built in: {advice}")
    return _made(name, load_object(name, "environment"), (), args)


def _made(name: str, kind: Callable[..., Environment], given: tuple[str, ...], args: Mapping[str, Any]) -> Environment:
    missing = [part for part in ("reset", "step", "close") if not hasattr(kind, part)]
    if missing:
        raise UserError(f"environment {name!r}: has no {', '.join(missing)}; see docs/environments.md")
    return construct(kind, args, f"environment {name!r}", "environment_args", given)
