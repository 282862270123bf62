"""rft_platform: reinforcement fine-tuning of LLM agents, orchestrated by Dagster."""

__version__ = "0.1.0"
