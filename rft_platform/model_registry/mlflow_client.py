"""Open the MLflow store: an SQLite file created on first use, or a server by URL."""

import logging
import os
import re
import sqlite3
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rft_platform.cluster.local.locks import MIGRATING, locked
from rft_platform.cluster.this_process import importing
from rft_platform.common.database_urls import require_driver
from rft_platform.common.errors import DiskFullError, RegistryError, StorageError, UserError
from rft_platform.common.fault_classification import is_disk_full
from rft_platform.common.files import atomic_path
from rft_platform.common.redaction import redact
from rft_platform.common.sqlite_files import (
    SQLITE_URI,
    DamagedDatabase,
    backup_of,
    damage_of_database,
    database_file,
    is_damage,
    remedy,
)
from rft_platform.model_registry.moved_database import follow_home

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_SCHEMES = (SQLITE_URI, "postgresql", "mysql", "mssql", "http://", "https://")
#: Time-out in seconds and number of retries. MLflow's client retries for minutes by default; a retry of the launch is
#: better than a long wait.
_HTTP_LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
_UNSAFE_NAME = re.compile(r"[/:'\"\n]")
#: Held while MLflow is imported, a store is opened and MLflow's global settings change. MLflow's packages import each
#: other in circles, so a second thread could see incomplete modules; MLflow's database migrations share state.
OPENING = threading.RLock()
_CHATTY_LOGGERS = ("mlflow.store.db.utils", "alembic.runtime.migration", "alembic.runtime.plugins.setup")


#: MLflow error codes of a wrong request, not of an unavailable MLflow. The callers handle them.
_ANSWERS = frozenset(
    {
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_ALREADY_EXISTS",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "ENDPOINT_NOT_FOUND",
    }
)


def open_client(tracking_uri: str) -> "MlflowClient":
    """Return an MLflow client for tracking and registry at ``tracking_uri``. A new SQLite store is created first.

    The first call of a process imports MLflow (about 2 s); a new store adds about a second. Raises ``UserError`` if the
    address is not a database or server URL, or if an SQLite file cannot be written. Raises ``RegistryError`` if the
    server does not answer, here and at every later call of the client.
    """
    if not tracking_uri.startswith(_SCHEMES):
        raise UserError(
            f"MLflow tracking URI {tracking_uri!r}: expected sqlite:///FILE, a database URL or http(s)://HOST; "
            "leave it empty for the project's own SQLite file"
        )
    if is_server(tracking_uri):
        _check_reachable(tracking_uri)
    elif database_file(tracking_uri) is None:
        require_driver(tracking_uri, "the MLflow tracking URI")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # send no telemetry unless the user enables it
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")  # a failure to log a trace is noticed
    for limit, value in _HTTP_LIMITS.items():
        os.environ.setdefault(limit, value)
    with OPENING, _quiet():
        make_database(tracking_uri)
        with importing():
            from mlflow.tracking import MlflowClient

        with registry_errors(tracking_uri), MIGRATING:
            return guarded(MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri), tracking_uri)


def make_database(tracking_uri: str) -> None:
    """Create an SQLite store's file with all its tables, unless it exists. Does nothing for databases and servers.

    If the home was copied or moved, the locations in an existing file are changed to those of the new home.

    The file is created atomically: an interrupted MLflow migration would leave tables that break every later migration.
    Raises ``UserError`` if its folder cannot be written.
    """
    file = database_file(tracking_uri)
    if file is None:
        return
    if file.exists():
        follow_home(file)
        return
    with OPENING, _locked_folder(file.parent, tracking_uri):
        if file.exists():  # another process created it while this one waited
            return
        with _quiet(), importing():
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            with registry_errors(tracking_uri), atomic_path(file) as temp, MIGRATING:
                SqlAlchemyStore(f"{SQLITE_URI}{temp}", str(file.parent / "artifacts")).engine.dispose()


def back_up(tracking_uri: str) -> None:
    """Copy an SQLite store to a file beside it (``backup_of``). Does nothing for other databases and servers."""
    file = database_file(tracking_uri)
    if file is None:
        return
    with (
        atomic_path(backup_of(file)) as temp,
        closing(sqlite3.connect(file)) as store,
        closing(sqlite3.connect(temp)) as copy,
    ):
        store.backup(copy)


def is_server(tracking_uri: str) -> bool:
    """Whether the store is an MLflow server and not a database that the platform opens itself."""
    return tracking_uri.startswith(("http://", "https://"))


def check_name(name: str, what: str) -> str:
    """Return ``name`` if MLflow accepts it as the name of an experiment or model; else raise ``UserError``."""
    if not name.strip() or _UNSAFE_NAME.search(name):
        raise UserError(f"{what} {name!r}: expected a non-empty name without / : ' \" and line ends; rename it")
    return name


def _check_reachable(url: str) -> None:
    """Fail early, because MLflow's own client would retry for minutes. Any HTTP answer passes, even an error page."""
    import httpx

    try:
        httpx.get(url, timeout=10)
    except httpx.HTTPError as error:
        raise RegistryError(f"MLflow server {url} does not answer ({error}): start it, or correct the URL") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress of MLflow's migrations, and deprecation warnings about its use of SQLAlchemy and pydantic."""
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextmanager
def _locked_folder(folder: Path, tracking_uri: str) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / ".mlflow"
        lock.with_name(f"{lock.name}.lock").touch()
    except OSError as error:
        raise UserError(f"MLflow store {tracking_uri}: {folder} cannot be written ({error.strerror})") from error
    with locked(lock):
        yield


class _Guarded:
    """Wraps every method of an MLflow client and translates its errors."""

    def __init__(self, client: "MlflowClient", tracking_uri: str) -> None:
        self._client = client
        self._tracking_uri = tracking_uri

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not callable(method):
            return method

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with registry_errors(self._tracking_uri):
                return method(*args, **kwargs)

        return call


def guarded(client: "MlflowClient", tracking_uri: str) -> "MlflowClient":
    """Wrap the client so that its calls raise ``RegistryError`` if MLflow fails."""
    return cast("MlflowClient", _Guarded(client, tracking_uri))


@contextmanager
def registry_errors(tracking_uri: str) -> Iterator[None]:
    """Translate MLflow failures into ``RegistryError``, or ``DiskFullError`` if the disk is full.

    A damaged database raises ``StorageError``. MLflow's errors about a wrong request are raised unchanged.
    """
    from mlflow.exceptions import MlflowException
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, RequestException, SQLAlchemyError, OSError) as error:
        if is_damage(error):
            raise StorageError(_damage(error, tracking_uri)) from error
        if isinstance(error, MlflowException) and error.error_code in _ANSWERS:
            raise
        if is_disk_full(error):
            raise DiskFullError(f"MLflow {tracking_uri}: no space left on its disk ({_first_line(error)})") from error
        raise RegistryError(
            f"MLflow at {tracking_uri} failed ({_first_line(error)}): check that it is running and can write"
        ) from error


def _damage(error: Exception, tracking_uri: str) -> str:
    file = database_file(tracking_uri)
    if file is None:
        return f"the database of MLflow {redact(tracking_uri)} is damaged ({_first_line(error)}): restore it"
    return str(DamagedDatabase(file, damage_of_database(file) or _first_line(error), remedy(file)))


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
