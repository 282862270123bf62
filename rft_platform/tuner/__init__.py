"""Tuning an agent from Python: ``from rft_platform.tuner import tune, DatasetConfig, ...``.

Source-compatible with ``agentscope.tuner``; AgentScope itself is not needed unless the workflow uses it. ``Workflow``,
``ModelWrapper``, ``Task`` and ``Experience`` are for workflows written as a class, which a configuration names.
"""

from rft_platform.rollout.class_style import Experience, ModelWrapper, Task, Workflow
from rft_platform.tuner.algorithm import AlgorithmConfig
from rft_platform.tuner.dataset import DatasetConfig
from rft_platform.tuner.model import TunerModelConfig
from rft_platform.tuner.result import TuneResult
from rft_platform.tuner.tuning import tune
from rft_platform.tuner.types import (
    JudgeOutput,
    JudgeType,
    WorkflowOutput,
    WorkflowType,
    check_judge_function,
    check_workflow_function,
)

__all__ = [
    "AlgorithmConfig",
    "DatasetConfig",
    "Experience",
    "JudgeOutput",
    "JudgeType",
    "ModelWrapper",
    "Task",
    "TuneResult",
    "TunerModelConfig",
    "Workflow",
    "WorkflowOutput",
    "WorkflowType",
    "check_judge_function",
    "check_workflow_function",
    "tune",
]
