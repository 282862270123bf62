"""Use and improve a served policy from Python: ``from rft_platform.online import OnlineClient, TrainingRunner``.

Importing this package imports openai, but neither torch nor dagster, so agents can use it in their own environment.

Read in this order:

- ``client``: ``OnlineClient`` and ``AsyncOnlineClient``, the OpenAI clients with feedback and commit.
- ``feedback``: declared metrics, request bodies, and the service's answers.
- ``training_runner``: ``TrainingRunner`` repeats selected requests of a production agent with the served policy.
- ``tools``: which tools a shadow run (a repeated request) may call; ``marking``: mark a request for training.
"""

from rft_platform.online.client import AsyncOnlineClient, OnlineClient
from rft_platform.online.feedback import CommitResult, FeedbackResult, Metric, UnknownAnswersError
from rft_platform.online.marking import mark
from rft_platform.online.tools import ShadowToolError, tool
from rft_platform.online.training_runner import AgentModel, ShadowRun, TrainingRunner
from rft_platform.serving.selection import (
    ExplicitMarkingStrategy,
    SamplingRateStrategy,
    SelectionContext,
    SelectionDecision,
    SelectionStrategy,
)

__all__ = [
    "AgentModel",
    "AsyncOnlineClient",
    "CommitResult",
    "ExplicitMarkingStrategy",
    "FeedbackResult",
    "Metric",
    "OnlineClient",
    "SamplingRateStrategy",
    "SelectionContext",
    "SelectionDecision",
    "SelectionStrategy",
    "ShadowRun",
    "ShadowToolError",
    "TrainingRunner",
    "UnknownAnswersError",
    "mark",
    "tool",
]
