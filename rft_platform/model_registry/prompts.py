"""Prompts in MLflow's prompt registry, with their lineage as tags."""

import re
from collections.abc import Mapping

from rft_platform.common.files import digest_json
from rft_platform.model_registry.mlflow_client import back_up
from rft_platform.model_registry.models import CHAMPION, ModelRegistry

_REFUSED = re.compile(r"[^a-zA-Z0-9_.-]")  # characters that MLflow refuses in a prompt's name, but not in a model's
_TAG_LIMIT = 5000  # characters of a tag that every MLflow store takes


def register_prompt(
    registry: ModelRegistry, training: str, text: str, tags: Mapping[str, str], *, promote: bool
) -> str:
    """Register a version of the project's system prompt, and return its address, as in ``prompts:/NAME/2``.

    The name is ``prompt_name`` of the model; ``training`` is the name of the project's MLflow run. With
    ``promote`` the alias ``champion`` names the version.
    """
    client, name = registry.training_run(training).client, prompt_name(registry.model_name)
    cut = {key: value[:_TAG_LIMIT] for key, value in tags.items()}
    version = client.register_prompt(name, text, commit_message="rft prompt optimise", tags=cut).version
    if promote:
        client.set_prompt_alias(name, CHAMPION, version)
    back_up(registry.tracking_uri)
    return f"prompts:/{name}/{version}"


def prompt_name(model: str) -> str:
    """The name of a model's prompts. Characters that MLflow refuses become ``-``; a digest keeps such names apart."""
    allowed = _REFUSED.sub("-", model)
    return f"{allowed if allowed == model else f'{allowed}-{digest_json(model)[:8]}'}-system-prompt"
