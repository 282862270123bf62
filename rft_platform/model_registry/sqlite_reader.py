"""Read model versions and experiments directly from MLflow's SQLite file, because importing MLflow takes longer."""

import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path

from rft_platform.model_registry.models import CHECKPOINT_TAG, MODEL_URI, RegisteredModel
from rft_platform.model_registry.moved_database import follow_home
from rft_platform.model_registry.tracking import RUN_TAG

_PREFIX = "sqlite:///"
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
    path = Path(tracking_uri.removeprefix(_PREFIX))
    if not tracking_uri.startswith(_PREFIX) or not path.is_file():
        return None
    follow_home(path)
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as connection:
            return _versions(connection, name)
    except sqlite3.Error:
        return None


def read_training_run(tracking_uri: str, experiment: str, name: str) -> tuple[str, str] | None:
    """The ids of ``experiment`` and of its training run ``name``.

    None if there is no such run, or direct reading is not possible.
    """
    path = Path(tracking_uri.removeprefix(_PREFIX))
    if not tracking_uri.startswith(_PREFIX) or not path.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as connection:
            found = connection.execute(_RUN, [experiment, RUN_TAG, name]).fetchone()
    except sqlite3.Error:
        return None
    return None if found is None else (str(found[0]), str(found[1]))


def model_name(address: str) -> str | None:
    """NAME of ``models:/NAME@alias`` or ``models:/NAME/3``; None for anything else."""
    match = MODEL_URI.fullmatch(address)
    return None if match is None else match["name"]


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
