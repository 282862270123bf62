"""Prompts in MLflow's prompt registry."""

import pytest

from rft_platform.model_registry.models import ModelRegistry
from rft_platform.model_registry.prompts import prompt_name, register_prompt


@pytest.mark.parametrize("model", ["demo-model", "My project-run 1", "数学"])
def test_a_prompt_is_registered_whatever_the_model_is_called(registry: ModelRegistry, model: str) -> None:
    registry.model_name = model
    addresses = [register_prompt(registry, "run", text, {"gate": "better"}, promote=True) for text in ("Add.", "Sum.")]
    assert addresses == [f"prompts:/{prompt_name(model)}/{version}" for version in (1, 2)]


def test_models_have_prompts_of_different_names() -> None:
    assert prompt_name("demo-model") == "demo-model-system-prompt"
    assert len({prompt_name(model) for model in ("数学", "物理", "a b", "a-b")}) == 4
