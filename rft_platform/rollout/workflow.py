"""Types of workflows (user code that solves one task with a model), and the function that loads them by name."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rft_platform.common.errors import UserError
from rft_platform.common.user_code import check_parameters, construct, load_object
from rft_platform.rollout.class_style import ClassWorkflow, FormatArgs, is_class_style
from rft_platform.tasks.task import Task

if TYPE_CHECKING:
    from rft_platform.cluster.interface import Cluster
    from rft_platform.rollout.recording.model_handle import ModelHandle


@dataclass(slots=True)
class WorkflowOutput:
    """The result of one run: a response for the judge, or the workflow's own reward, or both.

    ``rewards`` is for runs with several trainable policies: it maps names of section ``policies`` to rewards.
    ``reward`` goes to the first policy, and to every policy that ``rewards`` does not name.
    """

    reward: float | None = None
    response: Any | None = None
    metrics: dict[str, float] | None = None
    rewards: dict[str, float] | None = None


#: ``async workflow(task: dict, model, ...) -> WorkflowOutput``; parameters are matched by name. A sync function
#: runs in a thread. A parameter ``system_prompt`` gets the taskset's ``format.system_prompt``, or None.
WorkflowFunction = Callable[..., Awaitable[WorkflowOutput] | WorkflowOutput]


@runtime_checkable
class SingleTurnWorkflow(Protocol):
    """A workflow of one model call: the runner sends whole batches through the token-in / token-out path."""

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """The conversation that the answer continues."""
        ...


@runtime_checkable
class AgentWorkflow(Protocol):
    """A workflow object that gets a ``Task``, with prompt and answer, instead of the dataset's row."""

    async def run(
        self, task: Task, model: "ModelHandle", auxiliary_models: Mapping[str, Any] | None = None
    ) -> WorkflowOutput:
        """Solve the task with ``model``, whose calls are recorded; calls of auxiliary models are not."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerWorkflow:
    """A workflow that worker processes load by name and run; this process never imports it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    format_args: FormatArgs = field(default_factory=FormatArgs)
    reward_fn_args: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None  # interpreter of the workers' environment; None: this one
    count: int | None = None  # maximum number of workers; None: the number of concurrent runs
    log_folder: Path | None = None  # folder of the workers' log; None: a temporary one
    cluster: "Cluster | None" = None  # where the workers run; None: as children of this process
    cpus: int = 1  # that the cluster reserves for each worker, if it has several machines
    resources: Mapping[str, float] = field(default_factory=dict)  # named resources of the cluster for each worker
    runtime_env: Mapping[str, Any] = field(default_factory=dict)  # Ray's runtime environment of each worker

    @property
    def environment_s(self) -> float:
        """The longest time that a node may need to build the runtime environment."""
        return float(self.runtime_env.get("config", {}).get("setup_timeout_seconds", 0.0))


#: Workflows that this process can call.
LocalWorkflow = WorkflowFunction | SingleTurnWorkflow | AgentWorkflow

Workflow = LocalWorkflow | WorkerWorkflow

_PROMPT = "system_prompt"  # the parameter of functions and classes that gets the system prompt

#: Built-in workflows by their name in a configuration.
BUILT_IN = {
    "single_turn": "rft_platform.rollout.runner.run_rollouts:SingleTurn",
    "calculator": "rft_platform.rollout.workflows.calculator:CalculatorWorkflow",
    "agentscope_react": "rft_platform.rollout.workflows.agentscope:AgentScopeReActWorkflow",
    "tool_call": "rft_platform.rollout.workflows.tool_call:ToolCallWorkflow",
    "frozen_lake": "rft_platform.rollout.workflows.frozen_lake:FrozenLakeWorkflow",
    "dialogue": "rft_platform.rollout.workflows.dialogue:DialogueWorkflow",
    "environment": "rft_platform.rollout.workflows.environment:EnvironmentWorkflow",
}


def check_workflow_function(function: Callable[..., Any]) -> None:
    """Raise ``ValueError`` unless the parameters are ``task`` and ``model``, and some of the optional ones.

    These are ``auxiliary_models``, ``logger`` and ``system_prompt``.
    """
    check_parameters(function, "Workflow function", ("task", "model"), ("auxiliary_models", "logger", _PROMPT))


def resolve_workflow(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    *,
    format_args: FormatArgs | None = None,
    reward_fn_args: Mapping[str, Any] | None = None,
) -> LocalWorkflow:
    """Return the workflow called ``name``: a built-in one, ``package.module:attribute`` or ``file.py:attribute``.

    The attribute may be a function (checked by ``check_workflow_function``), a workflow object, or a workflow class.
    A class gets ``arguments``. A class or function with a parameter ``system_prompt`` gets the system prompt. If
    ``format_args`` is given, its system prompt replaces ``system_prompt``. A class-style workflow, of which one object
    is created for each run, finds ``arguments``, ``format_args`` and ``reward_fn_args`` in its task. Raises UserError.
    """
    target = _load(name)
    keys = format_args or FormatArgs(system_prompt=system_prompt)
    if isinstance(target, type):
        if is_class_style(target):
            return ClassWorkflow(target, dict(arguments or {}), keys, dict(reward_fn_args or {}))
        prompt = {_PROMPT: keys.system_prompt} if keys.system_prompt is not None and _has_prompt(target) else {}
        target = construct(target, {**prompt, **(arguments or {})}, f"workflow {name!r}", "workflow_args")
    elif arguments:
        raise UserError(f"workflow {name!r}: workflow_args {sorted(arguments)} given, but only a class can take them")
    if isinstance(target, SingleTurnWorkflow | AgentWorkflow):
        return target
    if not callable(target):
        raise UserError(f"workflow {name!r}: is {type(target).__name__}, expected a function or a workflow object")
    try:
        check_workflow_function(target)
    except ValueError as error:
        raise UserError(f"workflow {name!r}: {error}") from error
    checked: WorkflowFunction = target
    return partial(checked, system_prompt=keys.system_prompt) if _has_prompt(checked) else checked


def takes_system_prompt(name: str) -> bool:
    """Whether the workflow called ``name`` gets the system prompt. Raises UserError if it cannot be loaded."""
    target = _load(name)
    return _has_prompt(target) or (isinstance(target, type) and is_class_style(target))


def _has_prompt(target: Any) -> bool:
    return callable(target) and _PROMPT in inspect.signature(target).parameters


def _load(name: str) -> Any:
    reference = BUILT_IN.get(name, name)
    if ":" not in reference and not reference.endswith(".py"):
        known = ", ".join(sorted(BUILT_IN))
        raise UserError(f"workflow {name!r}: unknown; expected one of {known}, or package.module:function")
    return load_object(reference, "workflow")
