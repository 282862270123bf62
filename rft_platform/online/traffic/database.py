"""Tables of the online service, and how its database is opened: SQLite by default, PostgreSQL by URL.

A row of ``calls`` is one choice of one model call. Its ``state`` only moves forward: recorded -> labelled -> committed
-> consumed. The other final states are ``untrainable`` (its sampling parameters give no importance ratios), ``stale``
(weights that are too old sampled it), ``expired`` (erased by age) and ``forgotten`` (erased because its subject asked
for it). Alembic creates the tables.
"""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from alembic import command
from alembic.config import Config
from sqlalchemy import JSON, BigInteger, Engine, ForeignKey, Index, Integer, String, create_engine, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    DisconnectionError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from rft_platform.cluster.local.locks import MIGRATING
from rft_platform.common import json_codec
from rft_platform.common.database_urls import require_driver, with_time_limits
from rft_platform.common.errors import StorageError, UserError

LOG = logging.getLogger(__name__)
T = TypeVar("T")

RECORDED, LABELLED, COMMITTED, CONSUMED = "recorded", "labelled", "committed", "consumed"
UNTRAINABLE, STALE, EXPIRED, FORGOTTEN = "untrainable", "stale", "expired", "forgotten"
STATES = (RECORDED, LABELLED, COMMITTED, CONSUMED, UNTRAINABLE, STALE, EXPIRED, FORGOTTEN)

FIRST_IMPORTED = 1_000_000_000  #: a policy version above this number was trained by another project and imported
MIGRATIONS = Path(__file__).with_name("migrations")  #: the folder of Alembic's scripts
_BUSY_TIMEOUT_MS = 30_000
_FILE = "rft_file"  # key in a connection's record: device and inode of the database file
_READS = "rft_reads"  # execution option that marks transactions that only read
_MOST_IN_QUERY = 500
_MIGRATION_LOCK = 7_301_950_411  # an advisory lock of PostgreSQL: one process migrates at a time
#: Not Alembic's default name: Dagster and MLflow use that, and may have their tables in the same Postgres database.
VERSION_TABLE = "traffic_schema_version"


NUMBER = BigInteger().with_variant(Integer(), "sqlite")  # SQLite numbers rows automatically in INTEGER columns only
_ONLY = 1  # number of the only row


class Base(DeclarativeBase):
    """Base class of the tables."""

    type_annotation_map: ClassVar[Any] = {dict[str, Any]: JSON, list[str]: JSON}


class Call(Base):
    """One choice of a model call: the sampled text and tokens, names that the request gave, and the state."""

    __tablename__ = "calls"
    __table_args__ = (
        Index("calls_msg_id_choice", "msg_id", "choice", unique=True),
        Index("calls_state", "state", "number"),
        Index("calls_task", "task_id", "state"),
        Index("calls_batch", "batch"),
        Index("calls_subject", "subject"),
        Index("calls_variant", "variant"),
        Index("calls_recent", "recorded_at", "action", "reward", "labelled_at", "batch", "policy_version"),
        Index("calls_conversation", "conversation", "number"),
        Index("calls_tenant", "tenant", "state"),
    )

    number: Mapped[int] = mapped_column(NUMBER, primary_key=True, autoincrement=True)
    msg_id: Mapped[str] = mapped_column(String(200))
    choice: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    tenant: Mapped[str] = mapped_column(String(200), default="")
    subject: Mapped[str | None] = mapped_column(String(200))  # the person whose data this is; `rft forget` erases it
    conversation: Mapped[str | None] = mapped_column(String(200))
    task_id: Mapped[str | None] = mapped_column(String(200))
    run_id: Mapped[str | None] = mapped_column(String(200))
    variant: Mapped[str | None] = mapped_column(String(100))  # which arm of a canary or an A/B test answered
    policy_version: Mapped[int | None]
    reward: Mapped[float | None]
    tokens: Mapped[int] = mapped_column(default=0)  # prompt and response
    recorded_at: Mapped[float]  # seconds since the epoch, like the other times
    labelled_at: Mapped[float | None]
    committed_at: Mapped[float | None]
    consumed_at: Mapped[float | None]
    batch: Mapped[int | None]  # the round whose rollouts hold the row
    action: Mapped[str] = mapped_column(String(16))  # what the call did
    model_call: Mapped[dict[str, Any]]  # the recorded call as JSON; {} after it was erased


class Feedback(Base):
    """One report of how well a run or a call did. It is kept for ever, also after a later feedback replaces it."""

    __tablename__ = "feedback"

    feedback_id: Mapped[str] = mapped_column(String(200), primary_key=True)
    received_at: Mapped[float]
    tenant: Mapped[str] = mapped_column(String(200), default="")
    metric: Mapped[str] = mapped_column(String(100))  # "reward" unless another declared metric is named
    value: Mapped[float | None]
    comment: Mapped[str | None]
    correction: Mapped[str | None]  # the answer that the user wanted instead
    tags: Mapped[dict[str, Any]]
    request: Mapped[dict[str, Any]]  # the body of the request that gave the feedback
    batch: Mapped[int | None]  # the round whose demonstrations hold the correction


class FeedbackCall(Base):
    """One call that a feedback is about."""

    __tablename__ = "feedback_calls"
    __table_args__ = (Index("feedback_calls_number", "number"),)

    feedback_id: Mapped[str] = mapped_column(ForeignKey("feedback.feedback_id"), primary_key=True)
    number: Mapped[int] = mapped_column(NUMBER, ForeignKey("calls.number"), primary_key=True)


class Batch(Base):
    """A round's choice of committed rows. The choice is stored once; an export repeated after a kill uses it again."""

    __tablename__ = "batches"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # the round
    rows: Mapped[int]
    settled_at: Mapped[float]
    consumed_at: Mapped[float | None]


class Event(Base):
    """An entry of the audit log with its reason.

    That is a decision on a version, a canary or an A/B test; an alert that begins or ends; a resumed training; or
    ``rft forget``.
    """

    __tablename__ = "events"

    number: Mapped[int] = mapped_column(NUMBER, primary_key=True, autoincrement=True)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(50))
    reason: Mapped[str]
    details: Mapped[dict[str, Any]]


class DatabaseUnavailableError(StorageError):
    """The database does not answer, or refuses all requests: the request was not carried out, or not confirmed."""

    retryable = True


def is_unavailable(error: DBAPIError) -> bool:
    """Whether the fault may lie with the database (connection, disk, lock), so that a retry may help.

    False if the database refuses the statement or its values.
    """
    return not isinstance(error, (DataError, IntegrityError, NotSupportedError, ProgrammingError))


@contextmanager
def answering() -> Iterator[None]:
    """Raise DatabaseUnavailableError instead of the errors of a database that does not work or has lost its tables."""
    try:
        yield
    except DBAPIError as error:
        if isinstance(error, (DataError, IntegrityError)):
            raise
        LOG.warning("the database does not answer a request: %s", cause(error))
        raise DatabaseUnavailableError("the database is unavailable: send the request again") from error


def cause(error: Exception) -> object:
    """The error of the database driver, to be logged: SQLAlchemy's error would quote the stored text."""
    return getattr(error, "orig", error)


def open_database(url: str) -> Engine:
    """Connect to the database and create its tables. Several processes may call this at the same time.

    ``url`` has SQLAlchemy's form. Raises UserError for a URL that SQLAlchemy does not understand.
    """
    require_driver(url, "buffer.trainer_input.experience_buffer.path")
    try:
        # parameters are personal data, which errors and logs must not show
        engine = create_engine(
            with_time_limits(url),
            pool_pre_ping=not url.startswith("sqlite"),
            hide_parameters=True,
            json_serializer=_json,
            json_deserializer=json_codec.parse,
        )
    except Exception as error:
        raise UserError(
            f"the database {url.partition('://')[0]}://... cannot be used: {error}; expected sqlite:///FILE or "
            "postgresql+psycopg2://USER@HOST/NAME"
        ) from error
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
        _watch_file(engine)
    with _one_at_a_time(engine) as connection, MIGRATING:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return engine


def _json(value: Any) -> str:
    return json_codec.dump(value).decode()


def _prepare_sqlite(engine: Engine) -> None:
    """Set up write-ahead logging, durable commits, and transactions that take the write lock when they begin.

    Without the lock, a transaction that reads first and writes later would fail if another transaction wrote in
    between. A transaction that only reads takes no lock.
    """

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # this module begins transactions, not the driver
        for pragma in (
            f"busy_timeout={_BUSY_TIMEOUT_MS}",
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            "secure_delete=ON",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        reads = connection.get_execution_options().get(_READS)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _watch_file(engine: Engine) -> None:
    """Drop connections to an SQLite file that was removed or replaced: their writes would be lost without an error.

    A file that was removed is not created again, because the new file would have no tables.
    """
    if not engine.url.database or engine.url.database == ":memory:" or engine.url.query:
        return
    file, seen = Path(engine.url.database), set[tuple[int, int]]()

    @event.listens_for(engine, "do_connect")
    def refuse_a_missing_file(_dialect: Any, _record: Any, _arguments: Any, _options: Any) -> None:
        if seen and not file.exists():
            raise sqlite3.OperationalError(f"the database file {file} was removed: restore it and start again")

    @event.listens_for(engine, "connect")
    def note(_connection: Any, record: Any) -> None:
        record.info[_FILE] = _identity(file)
        seen.add(record.info[_FILE])

    @event.listens_for(engine, "checkout")
    def check(_connection: Any, record: Any, _proxy: Any) -> None:
        if record.info[_FILE] != _identity(file):
            raise DisconnectionError(f"the database file {file} was replaced by another file")


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def transactions(engine: Engine) -> Callable[[], AbstractContextManager[Session]]:
    """A function that begins a transaction that may write."""
    return sessionmaker(engine, expire_on_commit=False).begin


def readings(engine: Engine) -> Callable[[], AbstractContextManager[Session]]:
    """A function that begins a transaction that only reads: on SQLite it waits for no other transaction.

    No other transaction waits for it either.
    """
    return sessionmaker(engine.execution_options(**{_READS: True}), expire_on_commit=False).begin


def parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """The values in parts that are small enough for the condition ``IN`` of one query."""
    return (values[start : start + _MOST_IN_QUERY] for start in range(0, len(values), _MOST_IN_QUERY))


@contextmanager
def _one_at_a_time(engine: Engine) -> Iterator[Any]:
    """A transaction that creates the tables, one process at a time."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        yield connection


class Owner(Base):
    """The owner of the database."""

    __tablename__ = "owner"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    home: Mapped[str] = mapped_column(String(64))  # id of the project's folder; it stays the same when the folder moves
    project: Mapped[str] = mapped_column(String(400))
    since: Mapped[float]


def claim(engine: Engine, home: str, project: str) -> None:
    """Record this project as the database's owner; raises UserError if the database belongs to another project."""
    dialect = postgresql if engine.dialect.name == "postgresql" else sqlite
    row = {"number": _ONLY, "home": home, "project": project[:400], "since": time.time()}
    with transactions(engine)() as session:
        session.connection().execute(dialect.insert(Owner).on_conflict_do_nothing().values(row))
        owner = session.get_one(Owner, _ONLY)
        if owner.home != home:
            raise UserError(
                f"the database of production traffic belongs to another home, that of project {owner.project}: give "
                f"{project} its own database (buffer.trainer_input.experience_buffer.path)"
            )
