"""Class-style workflows: one object is created per run, and its ``run_async()`` returns the run's experiences.

A class written for Trinity-RFT works here after a change of its imports. The base classes below have the members that
such classes use; ``class_style_model`` has the model and the experiences.
"""

import copy
import inspect
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from rft_platform.common.errors import UserCodeError
from rft_platform.common.threads import call_in_thread
from rft_platform.rollout.class_style_model import (
    Experience,
    ModelWrapper,
    RolloutArgs,
    calls_of,
    rollout_args_of,
)
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.tasks.task import Task as PlatformTask

__all__ = [
    "WORKFLOWS", "AsyncMathWorkflow", "AsyncSimpleWorkflow", "ClassWorkflow", "Experience", "FormatArgs",
    "MathWorkflow", "ModelWrapper", "MultiTurnWorkflow", "RolloutArgs", "SimpleWorkflow", "Task", "Workflow",
    "is_class_style",
]  # fmt: skip

#: The system prompt of ``MathWorkflow`` where the taskset has none.
MATH_PROMPT = (
    "Solve the user's problem. First think about it between <think> and </think>, then give the answer between "
    "<answer> and </answer>."
)

Kind = TypeVar("Kind", bound=type)


@dataclass(slots=True)
class FormatArgs:
    """Dataset columns of prompt and answer, and the system prompt: ``format`` of the taskset."""

    prompt_key: str | None = "question"
    response_key: str | None = "answer"
    system_prompt: str | None = None
    reply_prefix: str | None = None  # always None: the model writes its whole answer


@dataclass(slots=True)
class Task:
    """One task as a class-style workflow sees it."""

    raw_task: dict[str, Any]  # the dataset's row, copied for every run
    task_id: str = ""
    format_args: FormatArgs = field(default_factory=FormatArgs)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    rollout_args: RolloutArgs = field(default_factory=RolloutArgs)
    reward_fn: Any = None  # a class may set its own, made with reward_fn_args; None: the taskset's judge rewards
    repeat_times: int = 1  # each run has its own object
    is_eval: bool = False
    prompt: str | None = None  # text of the prompt column

    @property
    def task_desc(self) -> Any:
        """Value of the prompt column, of chat messages the user's text; None if the row has none."""
        key = self.format_args.prompt_key
        value = None if key is None else self.raw_task.get(key)
        return self.prompt if isinstance(value, list) and self.prompt is not None else value

    @property
    def truth(self) -> Any:
        """Value of the answer column; None if the row has none."""
        key = self.format_args.response_key
        return None if key is None else self.raw_task.get(key)

    def to_dict(self) -> dict[str, Any]:
        """The dataset's row."""
        return self.raw_task


class Workflow:
    """Base class of class-style workflows: one object per run. Override ``run_async``, or ``run`` for blocking code."""

    can_reset: ClassVar[bool] = False  # has no effect: each run has its own object
    can_repeat: ClassVar[bool] = False  # likewise
    is_async: ClassVar[bool] = False  # has no effect: a class that overrides run_async is asynchronous

    def __new__(cls, *_positional: Any, **arguments: Any) -> Any:
        """Set the members before ``__init__`` runs, so that a class need not call that of this base class."""
        workflow = super().__new__(cls)
        workflow._set_members(**{name: arguments.get(name) for name in ("task", "model", "auxiliary_models")})
        return workflow

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        """``auxiliary_models``: those of the configuration, in its order, with the same methods as ``model``."""
        self._set_members(task, model, auxiliary_models)

    def _set_members(self, task: Any, model: Any, auxiliary_models: list[Any] | None) -> None:
        self.task: Task = task
        self.model: ModelWrapper = model
        self.format_args = None if task is None else task.format_args
        self.auxiliary_model_wrappers = auxiliary_models or []
        client = "get_openai_async_client" if overrides_async(type(self)) else "get_openai_client"
        self.auxiliary_models = [getattr(each, client)() for each in self.auxiliary_model_wrappers]
        self.repeat_times, self.run_id_base = 1, 0
        self.logger = logging.getLogger(type(self).__module__)

    @cached_property
    def rollout_args(self) -> dict[str, Any]:
        """The taskset's sampling parameters, as arguments of ``model.chat``. A class may change or override them."""
        return asdict(self.task.rollout_args)

    def reset(self, task: Task) -> None:
        """Take another task. The platform never calls it: each run has its own object."""
        self.task = task
        self.__dict__.pop("rollout_args", None)

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Set how often ``run`` solves the task. The platform never calls it: each run has its own object."""
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def run(self) -> list[Experience]:
        """Solve the task and return its experiences; called in a thread."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither run_async nor run")

    async def run_async(self) -> list[Experience]:
        """Solve the task and return its experiences. The last reward set on an experience is the run's reward."""
        return await call_in_thread(self.run, {})


class MultiTurnWorkflow(Workflow):
    """Base class of workflows that make an experience of a whole conversation."""

    def process_messages_to_experience(
        self, messages: list[dict[str, Any]], reward: float, info: Mapping[str, Any] | None = None, **_unused: Any
    ) -> Experience:
        """Return the calls that sampled the assistant messages, with the run's reward; numbers of ``info`` are metrics.

        Raises UserCodeError if no message was sampled.
        """
        experience = self.model.convert_messages_to_experience(messages)
        experience.reward, experience.info = reward, dict(info or {})
        numbers = {name: float(value) for name, value in experience.info.items() if isinstance(value, int | float)}
        experience.metrics |= numbers
        return experience

    async def process_messages_to_experience_async(
        self, messages: list[dict[str, Any]], reward: float, info: Mapping[str, Any] | None = None, **_unused: Any
    ) -> Experience:
        """Return the same as ``process_messages_to_experience``."""
        return self.process_messages_to_experience(messages, reward, info)


class SimpleWorkflow(Workflow):
    """One call with the prompt. ``reward_fn`` rewards the answer; without one, the taskset's judge does."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Read the task."""
        super().reset(task)
        self.format_args = task.format_args
        self.system_prompt, self.reply_prefix = task.format_args.system_prompt, task.format_args.reply_prefix
        self.raw_task, self.task_desc, self.truth = task.raw_task, task.task_desc, task.truth
        self.workflow_args, self.reward_fn_args = task.workflow_args, task.reward_fn_args
        self.reward_fn: Any = None if task.reward_fn is None else task.reward_fn(**task.reward_fn_args)

    def format_messages(self) -> list[dict[str, Any]]:
        """The conversation that the answer continues. Raises UserCodeError for a task without a prompt."""
        if self.task_desc is None:
            key = self.task.format_args.prompt_key
            raise UserCodeError(
                f"{type(self).__name__}: the task has no prompt (the taskset's format.prompt_key is {key!r}, and the "
                f"columns of its row are {', '.join(self.raw_task)}); name the column, or override format_messages()"
            )
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": self.task_desc}]

    def run(self) -> list[Experience]:
        """Make the call and reward its answers."""
        return self._rewarded(self.model.chat(self.format_messages(), **self.rollout_args))

    def _rewarded(self, answers: list[Experience]) -> list[Experience]:
        for answer in answers if self.reward_fn is not None else ():
            parts = self.reward_fn(response=answer.response_text, truth=self.truth)
            answer.metrics |= parts
            answer.reward = sum(parts.values())
        return answers


class AsyncSimpleWorkflow(SimpleWorkflow):
    """The same, asynchronous."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Make the call and reward its answers."""
        return self._rewarded(await self.model.chat_async(self.format_messages(), **self.rollout_args))


class MathWorkflow(SimpleWorkflow):
    """One call that asks for thoughts and an answer between tags. Its rewards are the judges ``math`` and ``tags``."""

    def reset(self, task: Task) -> None:
        """Read the task; without a system prompt it gets that of this workflow."""
        task.format_args.system_prompt = task.format_args.system_prompt or MATH_PROMPT
        super().reset(task)


class AsyncMathWorkflow(AsyncSimpleWorkflow, MathWorkflow):
    """The same, asynchronous."""


class Registry:
    """Accepts the decorator by which classes register themselves. A configuration names a class by its module."""

    def register_module(self, name: str | None = None, **_options: Any) -> Any:
        """Return a decorator that leaves the class as it is."""

        def unchanged(kind: Kind) -> Kind:
            return kind

        return unchanged


WORKFLOWS = Registry()


def is_class_style(target: type) -> bool:
    """Whether one object of the class ``target`` is created for each run, from the run's task and the model."""
    return issubclass(target, Workflow) or {"task", "model"} <= inspect.signature(target).parameters.keys()


def overrides_async(kind: type) -> bool:
    """Whether the class has its own ``run_async``."""
    return getattr(kind, "run_async", Workflow.run_async) is not Workflow.run_async


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
            replace(self.format_args, system_prompt=task.system or self.format_args.system_prompt),
            copy.deepcopy(dict(self.arguments)),
            copy.deepcopy(dict(self.reward_fn_args)),
            rollout_args_of(model),
            prompt=task.prompt,
        )
        arguments: dict[str, Any] = {"task": own_task, "model": ModelWrapper(model)}
        init = inspect.getattr_static(self.kind, "__init__")  # the signature of the class is that of __new__
        parameters = inspect.signature(init).parameters
        if "auxiliary_models" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            arguments["auxiliary_models"] = [ModelWrapper(each) for each in (auxiliary_models or {}).values()]
        if overrides_async(self.kind):
            return calls_of(await self.kind(**arguments).run_async())
        return calls_of(await call_in_thread(lambda: self.kind(**arguments).run(), {}))
