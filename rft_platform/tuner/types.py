"""What workflows and judges are and what they return, as users write them.

The outputs are pydantic models, as in the API that this one is compatible with. ``rollout.workflow`` and
``judging.types`` have dataclasses of the same names and fields: worker processes load those in environments where only
``openai`` is sure to be there. Either kind may be returned anywhere.
"""

from collections.abc import Callable
from typing import Any

from rft_platform.judging.types import check_judge_function
from rft_platform.rollout.workflow import check_workflow_function
from rft_platform.tuner.section import TunerSection

__all__ = [
    "JudgeOutput",
    "JudgeType",
    "WorkflowOutput",
    "WorkflowType",
    "check_judge_function",
    "check_workflow_function",
]

#: ``async workflow(task: dict, model, auxiliary_models=None, logger=None) -> WorkflowOutput``; matched by name.
WorkflowType = Callable[..., Any]

#: ``async judge(task: dict, response: Any, auxiliary_models=None, logger=None) -> JudgeOutput``; matched by name.
JudgeType = Callable[..., Any]


class WorkflowOutput(TunerSection):
    """What one run of a workflow returns: something for the judge, or a reward of its own, or both."""

    reward: float | None = None
    """Counts where no judge is given."""
    response: Any | None = None
    """For the judge: text, JSON values, or an object such as AgentScope's ``Msg``."""
    metrics: dict[str, float] | None = None
    """Further numbers; they stand on the run's last step."""
    rewards: dict[str, float] | None = None
    """What a policy of section ``policies`` gets, by its name, where ``reward`` is not meant for it."""


class JudgeOutput(TunerSection):
    """The judgement of one run."""

    reward: float
    """What the run earned; every model call of it learns from it."""
    metrics: dict[str, float] | None = None
    """Further numbers; they are kept as parts of the reward."""
    rewards: dict[str, float] | None = None
    """What a policy of section ``policies`` gets, by its name, where ``reward`` is not meant for it."""
