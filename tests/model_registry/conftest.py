"""A migrated, empty MLflow store, made once and copied for every test."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.model_registry.mlflow_client import open_client
from rft_platform.model_registry.models import ModelRegistry


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    open_client(f"sqlite:///{path}")
    return path


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
