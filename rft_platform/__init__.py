"""rft_platform: reinforcement fine-tuning of LLM agents, orchestrated by Dagster.

``docs/architecture.md`` describes the packages, and its table "Where is ...?" names the file for a task. ``common``
holds what all packages may use; ``definitions.py`` is Dagster's entry point, and ``component.py`` that of other Dagster
deployments.
"""

__version__ = "0.1.0"

_COMPONENT = "RftProjectComponent"  # Dagster's `dg` looks for it in this module


def __getattr__(name: str) -> object:
    """Import the component when it is used: most processes of the platform must not load Dagster."""
    if name == _COMPONENT:
        from rft_platform.component import RftProjectComponent

        return RftProjectComponent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), _COMPONENT]
