"""The online service, and its Python clients: ``from rft_platform.online import OnlineClient, TrainingRunner``.

The service serves the policy to production clients and keeps their calls and feedback; rounds train on them. Nothing
is imported before it is used, and the clients import neither torch nor dagster, so agents can use them in their own
environment. Read in this order:

- ``client``: the OpenAI clients with feedback and commit, and ``TrainingRunner``.
- ``traffic``: the database of calls and feedback, and what is computed from it.
- ``releases``: which version serves, canaries and A/B tests; versions that pass between two hosts.
- ``gateway``: the HTTP API in front of the engine. ``pages``: the status page and the preference page.
- ``service``: all of it in one process, which ``servers.online_service`` starts.
- ``source``: the traffic as the rounds of a project see it. ``project``: open a project together with its traffic.
- ``forget``: erase a person's traffic from database, stored rows and records.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rft_platform.online.client.feedback import CommitResult, FeedbackResult, Metric, UnknownAnswersError
    from rft_platform.online.client.openai_clients import AsyncOnlineClient, OnlineClient, mark
    from rft_platform.online.client.training_runner import AgentModel, ShadowRun, ShadowToolError, TrainingRunner, tool
    from rft_platform.online.traffic.selection import (
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
_MODULES = ("client.feedback", "client.openai_clients", "client.training_runner", "traffic.selection")


def __getattr__(name: str) -> object:
    """Import an exported name when it is used: the platform's own processes do not need the clients."""
    if name in __all__:
        for module in _MODULES:
            if hasattr(found := import_module(f"{__name__}.{module}"), name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
