"""A project's folder that was moved as a whole: the absolute paths in it are made to point into it again."""

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from rft_platform.checkpoint_files import MANIFEST
from rft_platform.config.home import Home
from rft_platform.errors import DamagedError
from rft_platform.files import is_sealed, read_sealed_json, write_json, write_sealed_json, write_text

LOG = logging.getLogger(__name__)
#: Where MLflow's own database names folders: table, column.
_MLFLOW_PATHS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("model_version_tags", "value"),
    ("logged_models", "artifact_location"),
)


def follow_move(home: Home, old_root: Path) -> None:
    """Rewrite what lay below ``old_root`` to lie below ``home``: configuration, notes, manifests, MLflow's SQLite file.

    Nothing of the project may run meanwhile. Dagster's records of past runs keep the paths of their time.
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
    """Paths below one folder, as they are below another."""

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
        """One path, or ``file://`` address of one; anything else is left as it is."""
        scheme = "file://" if text.startswith("file://") else ""
        path = text.removeprefix(scheme)
        below = path == self.old or path.startswith(f"{self.old}/")
        return f"{scheme}{self.new}{path[len(self.old) :]}" if below else text


def _rewrite_mlflow(database: Path, moved: _Moved) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        for table, column in _MLFLOW_PATHS:
            known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            if column not in known:
                continue  # of another version of MLflow
            for (value,) in connection.execute(f"SELECT DISTINCT {column} FROM {table}").fetchall():
                if value is not None and (now := moved.text(value)) != value:
                    connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (now, value))
