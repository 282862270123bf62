"""rft_platform: reinforcement fine-tuning of LLM agents, orchestrated by Dagster.

``docs/architecture.md`` describes the packages, and its table "Where is ...?" names the file for a task. ``common``
holds what all packages may use; ``definitions.py`` is Dagster's entry point.
"""

__version__ = "0.1.0"
