"""Tuning an agent from Python: ``from rft_platform.tuner import tune, DatasetConfig, ...``.

Source-compatible with ``agentscope.tuner``; AgentScope itself is not needed unless the workflow uses it.
"""

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
    "JudgeOutput",
    "JudgeType",
    "TuneResult",
    "TunerModelConfig",
    "WorkflowOutput",
    "WorkflowType",
    "check_judge_function",
    "check_workflow_function",
    "tune",
]
