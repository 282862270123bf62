"""Read model versions and experiments directly from MLflow's SQLite file, because importing MLflow takes longer."""

import sqlite3
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from rft_platform.common.sqlite_files import database_file
from rft_platform.model_registry.models import CHECKPOINT_TAG, MODEL_URI, RegisteredModel
from rft_platform.model_registry.moved_database import follow_home
from rft_platform.model_registry.tracking import RUN_TAG

_T = TypeVar("_T")
_RUN = (
    "SELECT e.experiment_id, r.run_uuid FROM experiments e JOIN runs r ON r.experiment_id = e.experiment_id "
    "JOIN tags t ON t.run_uuid = r.run_uuid WHERE e.name = ? AND t.key = ? AND t.value = ? "
    "AND r.lifecycle_stage = 'active'"
)
_DELETED = "Deleted_Internal"  # stage of a deleted version in MLflow


def read_versions(tracking_uri: str, name: str) -> list[RegisteredModel] | None:
    """Return all versions of the model ``name``, oldest first, with checkpoint folder, run and aliases.

    None if direct reading is not possible (a server, another database, a different MLflow schema): then ask MLflow.
    """
    if (path := database_file(tracking_uri)) and path.is_file():
        follow_home(path)
    return _asked(path, lambda connection: _versions(connection, name))


def read_training_run(tracking_uri: str, experiment: str, name: str) -> tuple[str, str] | None:
    """The ids of ``experiment`` and of its training run ``name``.

    None if there is no such run, or direct reading is not possible.
    """
    found = _asked(
        database_file(tracking_uri),
        lambda connection: connection.execute(_RUN, [experiment, RUN_TAG, name]).fetchone(),
    )
    return None if found is None else (str(found[0]), str(found[1]))


def model_name(address: str) -> str | None:
    """NAME of ``models:/NAME@alias`` or ``models:/NAME/3``; None for anything else."""
    match = MODEL_URI.fullmatch(address)
    return None if match is None else match["name"]


def _asked(path: Path | None, question: Callable[[sqlite3.Connection], _T]) -> _T | None:
    """The answer to ``question`` from the database at ``path``; None if it cannot be read."""
    if path is None or not path.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            return question(connection)
    except sqlite3.Error:
        return None


def _versions(connection: sqlite3.Connection, name: str) -> list[RegisteredModel]:
    aliases: dict[int, list[str]] = defaultdict(list)
    for alias, version in connection.execute(
        "SELECT alias, version FROM registered_model_aliases WHERE name = ? ORDER BY alias", [name]
    ):
        aliases[version].append(alias)
    found = connection.execute(
        "SELECT v.version, coalesce(t.value, v.source), v.run_id FROM model_versions v LEFT JOIN model_version_tags t "
        "ON t.name = v.name AND t.version = v.version AND t.workspace = v.workspace AND t.key = ? "
        "WHERE v.name = ? AND v.current_stage != ? ORDER BY v.version",
        [CHECKPOINT_TAG, name, _DELETED],
    )
    return [
        RegisteredModel(name, version, Path(folder), aliases=tuple(aliases[version]), run_id=run or None)
        for version, folder, run in found
    ]
