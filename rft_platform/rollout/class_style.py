"""Class-style workflows: one object is created per run, and its ``run_async()`` returns the run's experiences.

A class written for Trinity-RFT's ``Workflow``, ``ModelWrapper``, ``Task`` and ``Experience`` works here after a change
of its imports.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rft_platform.common.threads import call_in_thread
from rft_platform.experience.record import ModelCall
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.tasks.task import Task as PlatformTask

#: The policy as one run sees it.
ModelWrapper = ModelHandle

#: One recorded model call; ``reward``, ``step_reward`` and ``metrics`` may be set.
Experience = ModelCall


@dataclass(frozen=True, slots=True)
class FormatArgs:
    """Dataset columns of prompt and answer, and the system prompt: ``format`` of the taskset."""

    prompt_key: str | None = "question"
    response_key: str | None = "answer"
    system_prompt: str | None = None


@dataclass(slots=True)
class Task:
    """One task as a class-style workflow sees it."""

    raw_task: dict[str, Any]  # the dataset's row, copied for every run
    task_id: str = ""
    format_args: FormatArgs = field(default_factory=FormatArgs)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)

    @property
    def task_desc(self) -> Any:
        """Value of the prompt column; None if the row has none."""
        key = self.format_args.prompt_key
        return None if key is None else self.raw_task.get(key)

    @property
    def truth(self) -> Any:
        """Value of the answer column; None if the row has none."""
        key = self.format_args.response_key
        return None if key is None else self.raw_task.get(key)


class Workflow:
    """Base class of class-style workflows: one object per run. Override ``run_async``, or ``run`` for blocking code."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        """``auxiliary_models``: those of the configuration, in its order, with the same methods as ``model``."""
        self.task = task
        self.model = model
        self.auxiliary_models = auxiliary_models or []
        self.format_args = task.format_args

    def run(self) -> list[Experience]:
        """Solve the task and return its experiences; called in a thread."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither run_async nor run")

    async def run_async(self) -> list[Experience]:
        """Solve the task and return its experiences. The last reward set on an experience is the run's reward."""
        return await call_in_thread(self.run, {})


def is_class_style(target: type) -> bool:
    """Whether one object of the class ``target`` is created for each run, from the run's task and the model."""
    return issubclass(target, Workflow) or {"task", "model"} <= inspect.signature(target).parameters.keys()


@dataclass(frozen=True)
class ClassWorkflow:
    """Adapts a class-style workflow to the runner: creates one object of ``kind`` per run."""

    kind: type
    arguments: Mapping[str, Any] = field(default_factory=dict)
    format_args: FormatArgs = field(default_factory=FormatArgs)
    reward_fn_args: Mapping[str, Any] = field(default_factory=dict)

    async def run(
        self, task: PlatformTask, model: ModelHandle, auxiliary_models: Mapping[str, Any] | None = None
    ) -> Any:
        """Create the object and await its ``run_async``.

        If the class overrides only ``run``, a thread creates the object and calls ``run``.
        """
        own_task = Task(
            copy.deepcopy(task.raw),
            task.task_id,
            self.format_args,
            copy.deepcopy(dict(self.arguments)),
            copy.deepcopy(dict(self.reward_fn_args)),
        )
        arguments: dict[str, Any] = {"task": own_task, "model": model}
        parameters = inspect.signature(self.kind).parameters
        if "auxiliary_models" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            arguments["auxiliary_models"] = list((auxiliary_models or {}).values())
        if _overrides_async(self.kind):
            return await self.kind(**arguments).run_async()
        return await call_in_thread(lambda: self.kind(**arguments).run(), {})


def _overrides_async(kind: type) -> bool:
    return getattr(kind, "run_async", Workflow.run_async) is not Workflow.run_async
