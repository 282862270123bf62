"""Tune an agent from Python: ``from rft_platform.tuner import tune, DatasetConfig, ...``.

Source-compatible with ``agentscope.tuner``; AgentScope itself is needed only if the workflow uses it. ``Workflow``,
``ModelWrapper``, ``Task`` and ``Experience`` are for class-style workflows, which a configuration names.

Read in this order:

- ``tuning``: ``tune()``, also from notebooks; ``types``: workflow and judge types and their outputs, and names of the
  API that this platform does not support.
- ``sections``: the settings that users give for model, dataset and algorithm.
- ``translation``: converts the arguments to the platform's configuration.
- ``model_selection``: ``select_model()``; ``prompt_tuning``: ``tune_prompt()``; ``calls``: their tasks
  and calls of functions.
- ``result``: ``TuneResult``.
"""

from rft_platform.judging.types import check_judge_function
from rft_platform.rollout.class_style import Experience, ModelWrapper, Task, Workflow
from rft_platform.rollout.workflow import check_workflow_function
from rft_platform.tuner.model_selection import select_model
from rft_platform.tuner.prompt_tuning import PromptTuneConfig, tune_prompt
from rft_platform.tuner.result import TuneResult
from rft_platform.tuner.sections import AlgorithmConfig, DatasetConfig, TunerModelConfig
from rft_platform.tuner.tuning import tune
from rft_platform.tuner.types import JudgeOutput, JudgeType, TinkerConfig, WorkflowOutput, WorkflowType

__all__ = [
    "AlgorithmConfig",
    "DatasetConfig",
    "Experience",
    "JudgeOutput",
    "JudgeType",
    "ModelWrapper",
    "PromptTuneConfig",
    "Task",
    "TinkerConfig",
    "TuneResult",
    "TunerModelConfig",
    "Workflow",
    "WorkflowOutput",
    "WorkflowType",
    "check_judge_function",
    "check_workflow_function",
    "select_model",
    "tune",
    "tune_prompt",
]
