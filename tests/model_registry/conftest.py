"""Registries on a copy of an empty MLflow store."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.model_registry.models import ModelRegistry


@pytest.fixture
def connect(empty_store: Path, tmp_path: Path) -> Callable[[], ModelRegistry]:
    """A registry on the test's own store; every call is like a new process that opens it again."""
    database = tmp_path / "mlflow" / "mlflow.db"
    database.parent.mkdir()
    shutil.copy(empty_store, database)
    return lambda: ModelRegistry(f"sqlite:///{database}", tmp_path / "mlflow" / "artifacts", "demo", "demo-model")


@pytest.fixture
def registry(connect: Callable[[], ModelRegistry]) -> ModelRegistry:
    return connect()
