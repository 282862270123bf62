"""Repair a project folder that was moved as a whole: rewrite the absolute paths that point into the old folder."""

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from rft_platform.common.digests import MANIFEST
from rft_platform.common.errors import DamagedError
from rft_platform.common.files import is_sealed, read_sealed_json, write_json, write_sealed_json, write_text
from rft_platform.config.home import Home

LOG = logging.getLogger(__name__)
#: Table and column of each path in MLflow's database.
_MLFLOW_PATHS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("model_version_tags", "value"),
    ("logged_models", "artifact_location"),
)


def follow_move(home: Home, old_root: Path) -> None:
    """Rewrite paths below ``old_root`` to paths below ``home``: configuration, notes, manifests, MLflow's SQLite file.

    No process of the project may run during the call. Dagster's records of past runs keep the old paths.
    """
    moved = _Moved(str(old_root), str(home.root))
    if home.config_file.exists():
        config = yaml.safe_load(home.config_file.read_text(encoding="utf-8"))
        text = yaml.safe_dump(moved.value(config), sort_keys=False)
        write_text(home.config_file, text)
    documents = [*home.rounds.glob("r*/*.json"), *home.checkpoints.rglob(MANIFEST)]
    for document in documents:
        try:
            sealed, content = is_sealed(document), read_sealed_json(document)
        except DamagedError as error:
            LOG.warning("left as it is: %s", error)
            continue
        if (now := moved.value(content)) != content:
            (write_sealed_json if sealed else write_json)(document, now)
    database = home.mlflow / "mlflow.db"
    if database.exists():
        _rewrite_mlflow(database, moved)


class _Moved:
    """Maps paths below one folder to paths below another."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def value(self, value: Any) -> Any:
        """A JSON or YAML value with every path in it rewritten."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        return value

    def text(self, text: str) -> str:
        """Rewrite a path or its ``file://`` address; return any other text unchanged."""
        scheme = "file://" if text.startswith("file://") else ""
        path = text.removeprefix(scheme)
        below = path == self.old or path.startswith(f"{self.old}/")
        return f"{scheme}{self.new}{path[len(self.old) :]}" if below else text


def _rewrite_mlflow(database: Path, moved: _Moved) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        for table, column in _MLFLOW_PATHS:
            known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            if column not in known:
                continue  # a different version of MLflow
            for (value,) in connection.execute(f"SELECT DISTINCT {column} FROM {table}").fetchall():
                if value is not None and (now := moved.text(value)) != value:
                    connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (now, value))
