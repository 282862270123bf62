"""Workflow and judge types and their outputs, as users write them.

The outputs are pydantic models, as in ``agentscope.tuner``. ``rollout.workflow`` and
``judging.types`` have dataclasses of the same names and fields, for worker processes in whose environments only
``openai`` is sure to be installed. Either kind may be returned anywhere.

Names of ``agentscope.tuner`` that this platform does not support raise an error with the reason.
"""

from collections.abc import Callable
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.tuner.sections import TunerSection

#: ``async workflow(task: dict, model, auxiliary_models=None, logger=None) -> WorkflowOutput``; matched by name.
WorkflowType = Callable[..., Any]

#: ``async judge(task: dict, response: Any, auxiliary_models=None, logger=None) -> JudgeOutput``; matched by name.
JudgeType = Callable[..., Any]


class WorkflowOutput(TunerSection):
    """The result of one run of a workflow: a response for the judge, or the workflow's own reward, or both."""

    reward: float | None = None
    """Reward of the run; used if there is no judge."""
    response: Any | None = None
    """What the judge rewards: text, JSON values, or an object such as AgentScope's ``Msg``."""
    metrics: dict[str, float] | None = None
    """Further numbers, stored on the run's last step."""
    rewards: dict[str, float] | None = None
    """Rewards of policies of section ``policies``, by name, if they differ from ``reward``."""


class JudgeOutput(TunerSection):
    """The judgement of one run."""

    reward: float
    """Reward of the run; every model call of the run learns from it."""
    metrics: dict[str, float] | None = None
    """Further numbers, stored as parts of the reward."""
    rewards: dict[str, float] | None = None
    """Rewards of policies of section ``policies``, by name, if they differ from ``reward``."""


class TinkerConfig:
    """Settings of Tinker, a paid training service."""

    def __init__(self, *_positional: Any, **_fields: Any) -> None:
        """Raises UserError: trainings run on this machine."""
        raise UserError(
            "TinkerConfig: Tinker is a paid service, and trainings run on this machine; leave it out. For an adapter "
            "give tune() a config_path with model: {lora_configs: [{lora_rank: 16}]}"
        )
