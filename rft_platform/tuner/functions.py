"""References to the user's functions, by which an experiment can be shown, resumed and judged without the script."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.user_code import is_live, keep_alive, load_object, reference_of
from rft_platform.judging.execution.agentscope_metrics import is_metric
from rft_platform.judging.types import check_judge_function
from rft_platform.rollout.workflow import check_workflow_function


@dataclass(frozen=True, slots=True)
class TunedFunctions:
    """References to workflow and judge, as a configuration stores them."""

    workflow: str
    judge: str | None  # None: the workflow sets the reward

    @property
    def notice(self) -> str | None:
        """A message about what is not possible, if other processes cannot import the functions; otherwise None."""
        live = [reference for reference in (self.workflow, self.judge) if reference is not None and is_live(reference)]
        if not live:
            return None
        names = " and ".join(reference.rpartition("/")[2] for reference in live)
        return (
            f"no other process can import {names} by name, so this experiment cannot be resumed or judged again from "
            "the UI or `rft run`: for this, define each function at the top level of a module or a script"
        )


def tuned_functions(workflow: Callable[..., Any], judge: Callable[..., Any] | None) -> TunedFunctions:
    """Return references to both functions. Raises ``ValueError`` if the parameters of a function are not accepted."""
    if not callable(workflow):
        raise ValueError(f"workflow_func is {workflow!r}; expected a function of task and model")
    check_workflow_function(workflow)
    if judge is None:
        return TunedFunctions(_reference(workflow, "workflow"), None)
    if not callable(judge):
        raise ValueError(f"judge_func is {judge!r}; expected a function of task and response")
    if not is_metric(judge):
        check_judge_function(judge)
    return TunedFunctions(_reference(workflow, "workflow"), _reference(judge, "judge"))


def _reference(value: Any, what: str) -> str:
    """Return the name of ``value`` if importing this name gives the same object; else keep ``value`` in memory.

    The reference to an object in memory is valid only in this process.
    """
    try:
        reference = reference_of(value)
        found = load_object(reference, what)
    except UserError:
        return keep_alive(value, what)
    return reference if found is value else keep_alive(value, what)
