"""Translate MLflow failures into errors of the platform: a ``RegistryError`` can be retried."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

from rft_platform.errors import DiskFullError, RegistryError, StorageError
from rft_platform.faults import is_disk_full
from rft_platform.redaction import redact
from rft_platform.sqlite_files import DamagedDatabase, damage_of_database, database_file, is_damage, remedy

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

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

    A damaged database raises ``StorageError``. Error codes of a wrong request pass unchanged.
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
