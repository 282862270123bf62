"""Keep the connections to Dagster's SQLite files open while a driver runs.

Dagster opens a connection for each event that it stores or reads, and closes it again. When the last connection to a
file is closed, SQLite writes its log into the file and waits for the disk. Both together take a third of what a round
costs beside its stages.

Upstream: the storages always use SQLAlchemy's ``NullPool``, and no open issue asks for another pool.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        setattr(events, events._connect.__name__, _connections_to_logs(events, engines))
    if isinstance(runs, SqliteRunStorage):
        engines[_RUNS] = _engine(runs._conn_string)
        setattr(runs, runs.connect.__name__, engines[_RUNS].begin)

    def close() -> None:
        for engine in engines.values():
            engine.dispose()

    return close


def _connections_to_logs(storage: SqliteEventLogStorage, engines: dict[str, Engine]) -> Callable[[str], object]:
    """A replacement of the method that connects to the event log of a run, or to the index."""

    @contextmanager
    def connect(shard: str) -> Iterator[Connection]:
        with storage._db_lock:
            engines[shard] = engine = engines.pop(shard, None) or _engine(storage.conn_string_for_shard(shard))
            if shard not in storage._initialized_dbs:
                storage._initdb(engine)
                storage._initialized_dbs.add(shard)
            for old in [name for name in engines if name not in _FOR_ALL][:-_OPEN_LOGS]:
                engines.pop(old).dispose()
            with engine.begin() as connection:
                yield connection

    return connect


def _engine(url: str) -> Engine:
    engine = create_engine(url, connect_args={"timeout": _BUSY_S})

    @event.listens_for(engine, "connect")
    def no_wait(connection: DBAPIConnection, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.close()

    return engine
