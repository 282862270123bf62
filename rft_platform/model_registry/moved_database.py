"""Change the absolute locations that MLflow's database stores to those of the home it was copied or moved to."""

import json
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rft_platform.cluster.local.locks import locked
from rft_platform.common.recorded_paths import from_record, to_record

LOG = logging.getLogger(__name__)
#: Table and column of each location in MLflow's database.
_LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("model_version_tags", "value"),
    ("logged_models", "artifact_location"),
    ("datasets", "dataset_source"),
)
_SOURCE = '{"uri": "'  # start of the source of a local dataset
#: Folder of the home with the artifacts of the experiment that MLflow itself creates in a new database.
_ARTIFACTS_OF_DEFAULT = Path("mlflow", "artifacts", "0")


def follow_home(database: Path) -> None:
    """Rewrite the locations in the database ``<home>/mlflow/mlflow.db`` if it was written in another home.

    Does nothing for databases at other paths, or if the file cannot be read or written.
    """
    home = database.absolute().parents[1]
    if database.absolute() != home / "mlflow" / "mlflow.db" or not database.is_file():
        return
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            if _other_home(connection, home) is None:
                return
    except sqlite3.Error:  # damaged: MLflow's own access reports it
        return
    try:
        with locked(database.with_name(".mlflow")), closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            written_in = _other_home(connection, home)
            if written_in is not None:  # no other process has rewritten the locations since the first check
                _rewrite(connection, written_in, home)
                LOG.info("%s was written in %s: its locations now name %s", database, written_in, home)
    except (sqlite3.Error, OSError) as error:
        LOG.warning("%s may name files of another folder and could not be rewritten: %s", database, error)


def _other_home(connection: sqlite3.Connection, home: Path) -> Path | None:
    """The home in which the database was written, if it is not ``home``."""
    found = connection.execute("SELECT artifact_location FROM experiments WHERE experiment_id = 0").fetchone()
    location = Path(_path(found[0])) if found and found[0] else None
    if location is None or Path(*location.parts[-3:]) != _ARTIFACTS_OF_DEFAULT:
        return None
    written_in = location.parents[2]
    same = written_in == home or (written_in.exists() and written_in.samefile(home))
    return None if same else written_in


def _rewrite(connection: sqlite3.Connection, written_in: Path, home: Path) -> None:
    for table, column in _LOCATIONS:
        known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if column not in known:
            continue  # a different version of MLflow
        for (value,) in connection.execute(f"SELECT DISTINCT {column} FROM {table}").fetchall():
            if value is not None and (now := _moved(value, written_in, home)) != value:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (now, value))


def _moved(location: str, written_in: Path, home: Path) -> str:
    """A path below ``written_in``, or its ``file://`` address, moved below ``home``; any other text is unchanged.

    The source of a dataset is JSON with the path in ``uri``.
    """
    if location.startswith(_SOURCE):
        source = json.loads(location)
        return json.dumps({**source, "uri": _moved(source["uri"], written_in, home)})
    recorded = to_record(_path(location), written_in)
    if not location.startswith(("/", "file://")) or recorded.startswith("/"):
        return location
    place = from_record(recorded, home)
    return place.as_uri() if location.startswith("file://") else str(place)


def _path(location: str) -> str:
    return unquote(urlsplit(location).path) if location.startswith("file://") else location
