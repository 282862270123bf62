"""The project of each recipe, written once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.recipes.recipe import recipe_named


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a recipe's project; tests leave it unchanged."""
    root = tmp_path_factory.mktemp("projects")

    def written(name: str) -> Path:
        if not (root / name).exists():
            recipe_named(name).write(root / name)
        return root / name

    return written
