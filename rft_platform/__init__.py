"""rft_platform: reinforcement fine-tuning of LLM agents, orchestrated by Dagster.

``docs/architecture.md`` describes the packages, and its table "Where is ...?" names the file for a task. ``common``
holds what all packages may use; ``definitions.py`` is Dagster's entry point, and ``component.py`` that of other Dagster
deployments.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rft_platform.component import RftProjectComponent as RftProjectComponent
    from rft_platform.rounds.reporting.round_tables import load_round as load_round

_EXPORTED = ("RftProjectComponent", "load_round")  # Dagster's `dg` looks for the component in this module


def __getattr__(name: str) -> object:
    """Import what is exported when it is used: most processes of the platform must not load Dagster."""
    if name == "RftProjectComponent":
        from rft_platform.component import RftProjectComponent

        return RftProjectComponent
    if name == "load_round":
        from rft_platform.rounds.reporting.round_tables import load_round

        return load_round
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_EXPORTED]
