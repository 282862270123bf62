"""Keep the connections to Dagster's SQLite files open while a driver runs.

Dagster opens a connection for each event that it stores or reads, and closes it again. When the last connection to a
file is closed, SQLite writes its log into the file and waits for the disk. Both together take a third of what a round
costs beside its stages. For each result of an asset check, Dagster opens one more to see whether a table exists.

Upstream: the storages always use SQLAlchemy's ``NullPool``, and no open issue asks for another pool.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.runs import SqliteRunStorage
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection

_BUSY_S = 30.0
_RUNS = "runs"
_FOR_ALL = {_RUNS, "index"}  # the runs, and the events of all runs that Dagster looks up across runs
_OPEN_LOGS = 4  # event logs of single runs: those of two threads, and the ones before


def keep_connections(instance: dg.DagsterInstance) -> Callable[[], None]:
    """Make the SQLite storages of an instance keep their connections; returns a function that closes them.

    A commit does not wait for the disk: after a power failure, but not after a kill, Dagster may lack its last events.
    The next drive reports the materialisations that are missing.
    """
    engines: dict[str, Engine] = {}  # the longest unused one first
    events, runs = instance.event_log_storage, instance.run_storage
    if isinstance(events, SqliteEventLogStorage):
        setattr(events, events._connect.__name__, _EventLogs(events, engines).connect)
        setattr(events, events.has_table.__name__, _remembered(events.has_table))
    if isinstance(runs, SqliteRunStorage):
        engines[_RUNS] = _engine(runs._conn_string)
        setattr(runs, runs.connect.__name__, engines[_RUNS].begin)

    def close() -> None:
        for engine in engines.values():
            engine.dispose()

    return close


def _remembered(has_table: Callable[[str], bool]) -> Callable[[str], bool]:
    """``has_table``, which asks the database only until the table exists."""
    known = set[str]()

    def remembered(table_name: str) -> bool:
        if table_name not in known and has_table(table_name):
            known.add(table_name)
        return table_name in known

    return remembered


class _EventLogs:
    """Connections to the event logs of runs, and to their index."""

    def __init__(self, storage: SqliteEventLogStorage, engines: dict[str, Engine]) -> None:
        self._storage = storage
        self._engines = engines
        self._tables = ""  # SQL that makes an empty event log, faster than Dagster's migrations

    @contextmanager
    def connect(self, shard: str) -> Iterator[Connection]:
        """Replaces the method of Dagster's storage."""
        storage, engines = self._storage, self._engines
        with storage._db_lock:
            engines[shard] = engine = engines.pop(shard, None) or _engine(storage.conn_string_for_shard(shard))
            if shard not in storage._initialized_dbs:
                self._make_tables(shard, engine)
                storage._initialized_dbs.add(shard)
            for old in [name for name in engines if name not in _FOR_ALL][:-_OPEN_LOGS]:
                engines.pop(old).dispose()
            with engine.begin() as connection:
                yield connection

    def _make_tables(self, shard: str, engine: Engine) -> None:
        is_new_log = shard not in _FOR_ALL and not Path(self._storage.path_for_shard(shard)).exists()
        if is_new_log and self._tables:
            with suppress(sqlite3.OperationalError), _driver(engine) as connection:
                connection.executescript(self._tables)
                return
        self._storage._initdb(engine)  # also if another process makes the same tables at once
        if is_new_log:
            with _driver(engine) as connection:
                self._tables = "\n".join(["PRAGMA journal_mode = WAL;", *connection.iterdump()])


@contextmanager
def _driver(engine: Engine) -> Iterator[sqlite3.Connection]:
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        yield driver


def _engine(url: str) -> Engine:
    engine = create_engine(url, connect_args={"timeout": _BUSY_S})

    @event.listens_for(engine, "connect")
    def no_wait(connection: DBAPIConnection, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.close()

    return engine
