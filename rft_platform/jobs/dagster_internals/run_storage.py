"""Dagster's SQLite storages: run storage with one SQLAlchemy engine for all queries, and the file of a run's event log.

Dagster's run storage creates an engine for each query, and each engine compiles its statements again. This takes half
of the time of a sensor tick.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import dagster as dg
import sqlalchemy as sa
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.runs import SqliteRunStorage
from sqlalchemy.pool import NullPool


class OneEngineRunStorage(SqliteRunStorage):
    """Opens a connection for each query, as Dagster does, so that the storage notices a replaced database."""

    @classmethod
    def like(cls, storage: SqliteRunStorage) -> "OneEngineRunStorage":
        """A storage on the same database."""
        return cls(storage._conn_string, storage.inst_data)

    @cached_property
    def _engine(self) -> sa.Engine:
        return sa.create_engine(self._conn_string, poolclass=NullPool)

    @cached_property
    def _has_run_times(self) -> bool:
        return super().has_run_stats_index_cols()

    @contextmanager
    def connect(self) -> Iterator[sa.Connection]:
        """A connection in a new transaction, which is committed at the end of the block."""
        with self._engine.connect() as connection, connection.begin():
            yield connection

    def has_run_stats_index_cols(self) -> bool:
        """Whether the table of runs has the columns of start and end times; the database is queried once."""
        return self._has_run_times

    def upgrade(self) -> None:
        """Migrate the database, which may add these columns."""
        super().upgrade()
        self.__dict__.pop("_has_run_times", None)


def event_log_file(instance: dg.DagsterInstance, run_id: str) -> Path | None:
    """The database file of a run's event log; None if one database holds all event logs (Postgres)."""
    storage = instance.event_log_storage
    return Path(storage.path_for_shard(run_id)) if isinstance(storage, SqliteEventLogStorage) else None
