"""What a workflow is: user code that solves one task with the model it is handed."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rft_platform.tasks.task import Task


@dataclass(slots=True)
class WorkflowOutput:
    """What one run returns: something for the judge, or a reward of its own, or both."""

    reward: float | None = None
    response: Any | None = None
    metrics: dict[str, float] | None = None


#: ``async workflow(task: dict, model, ...) -> WorkflowOutput``; parameters are matched by name.
WorkflowFunction = Callable[..., Awaitable[WorkflowOutput]]


@runtime_checkable
class SingleTurnWorkflow(Protocol):
    """A workflow that is one model call: the runner sends whole batches through the token-in / token-out path."""

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """The conversation whose continuation is the answer."""
        ...
