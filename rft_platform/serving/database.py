"""Tables of the online service, and how its database is opened: SQLite by default, PostgreSQL by URL.

A row of ``calls`` is one choice of one model call. Its ``state`` only moves forward: recorded -> labelled -> committed
-> consumed. Other ends are ``untrainable`` (its sampling parameters give no importance ratios), ``stale`` (sampled by
weights that are too old), ``expired`` and ``forgotten``. Alembic brings a database of an older version up to date.
"""

import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from alembic import command
from alembic.config import Config
from sqlalchemy import JSON, BigInteger, Engine, ForeignKey, Index, Integer, String, create_engine, event, text
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    DisconnectionError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from rft_platform.common import json_codec
from rft_platform.common.errors import StorageError, UserError

LOG = logging.getLogger(__name__)

RECORDED, LABELLED, COMMITTED, CONSUMED = "recorded", "labelled", "committed", "consumed"
UNTRAINABLE, STALE, EXPIRED, FORGOTTEN = "untrainable", "stale", "expired", "forgotten"
STATES = (RECORDED, LABELLED, COMMITTED, CONSUMED, UNTRAINABLE, STALE, EXPIRED, FORGOTTEN)

FIRST_IMPORTED = 1_000_000_000  #: policy versions above it were trained by another project
MIGRATIONS = Path(__file__).with_name("migrations")  #: the folder of Alembic's scripts
_BUSY_TIMEOUT_MS = 30_000
_FILE = "rft_file"  # of a connection's record: device and inode of its file
_READS = "rft_reads"  # execution option of transactions that only read
_UPGRADE_LOCK = 7_301_950_411  # an advisory lock of PostgreSQL: one process upgrades at a time


NUMBER = BigInteger().with_variant(Integer(), "sqlite")  # SQLite counts in INTEGER columns only


class Base(DeclarativeBase):
    """Base class of the tables."""

    type_annotation_map: ClassVar[Any] = {dict[str, Any]: JSON, list[str]: JSON}


class Call(Base):
    """One choice of a model call: what was sampled, who may be named with it, and how far it is on its way."""

    __tablename__ = "calls"
    __table_args__ = (
        Index("calls_msg_id_choice", "msg_id", "choice", unique=True),
        Index("calls_state", "state", "number"),
        Index("calls_task", "task_id", "state"),
        Index("calls_batch", "batch"),
        Index("calls_subject", "subject"),
        Index("calls_recent", "recorded_at", "action", "reward", "labelled_at", "batch", "policy_version"),
        Index("calls_conversation", "conversation", "number"),
    )

    number: Mapped[int] = mapped_column(NUMBER, primary_key=True, autoincrement=True)
    msg_id: Mapped[str] = mapped_column(String(200))
    choice: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    tenant: Mapped[str] = mapped_column(String(200), default="")
    subject: Mapped[str | None] = mapped_column(String(200))  # whose data it is; `rft forget` erases by it
    conversation: Mapped[str | None] = mapped_column(String(200))
    task_id: Mapped[str | None] = mapped_column(String(200))
    run_id: Mapped[str | None] = mapped_column(String(200))
    variant: Mapped[str | None] = mapped_column(String(100))  # which arm of a canary or an A/B test answered
    policy_version: Mapped[int | None]
    reward: Mapped[float | None]
    tokens: Mapped[int] = mapped_column(default=0)  # prompt and response
    recorded_at: Mapped[float]  # seconds since the epoch, as are the times below
    labelled_at: Mapped[float | None]
    committed_at: Mapped[float | None]
    consumed_at: Mapped[float | None]
    batch: Mapped[int | None]  # the round whose rollouts hold the row
    action: Mapped[str | None] = mapped_column(String(16))  # what the call did; None: an earlier version recorded it
    model_call: Mapped[dict[str, Any]]  # the recorded call as JSON; {} once it is erased or has expired


class Feedback(Base):
    """One report of how well a run or a call did. Kept for ever, also when a later one replaces it."""

    __tablename__ = "feedback"

    feedback_id: Mapped[str] = mapped_column(String(200), primary_key=True)
    received_at: Mapped[float]
    tenant: Mapped[str] = mapped_column(String(200), default="")
    metric: Mapped[str] = mapped_column(String(100))  # "reward" unless another declared metric is named
    value: Mapped[float | None]
    comment: Mapped[str | None]
    correction: Mapped[str | None]  # the answer that the user would have wanted
    tags: Mapped[dict[str, Any]]
    request: Mapped[dict[str, Any]]  # as it was received
    batch: Mapped[int | None]  # the round whose demonstrations hold the correction


class FeedbackCall(Base):
    """Which calls a feedback is about."""

    __tablename__ = "feedback_calls"

    feedback_id: Mapped[str] = mapped_column(ForeignKey("feedback.feedback_id"), primary_key=True)
    number: Mapped[int] = mapped_column(NUMBER, ForeignKey("calls.number"), primary_key=True)


class Batch(Base):
    """The committed rows that one round trains on: settled once, so that a killed export repeats the same rows."""

    __tablename__ = "batches"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # the round
    rows: Mapped[int]
    settled_at: Mapped[float]
    consumed_at: Mapped[float | None]


class Event(Base):
    """A decision or an access, with its reason: promotions, roll-backs, erasures, refused keys."""

    __tablename__ = "events"

    number: Mapped[int] = mapped_column(NUMBER, primary_key=True, autoincrement=True)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(50))
    reason: Mapped[str]
    details: Mapped[dict[str, Any]]


class DatabaseUnavailableError(StorageError):
    """The database does not answer, or refuses everybody: the request was not carried out, or not confirmed."""

    retryable = True


def is_unavailable(error: DBAPIError) -> bool:
    """Whether the database does not work at all, so that a repetition may help; else it refuses these values."""
    return not isinstance(error, (DataError, IntegrityError, NotSupportedError, ProgrammingError))


@contextmanager
def answering() -> Iterator[None]:
    """Errors of a database that does not work, or has lost its tables, become DatabaseUnavailableError."""
    try:
        yield
    except DBAPIError as error:
        if isinstance(error, (DataError, IntegrityError)):
            raise
        LOG.warning("the database does not answer a request: %s", cause(error))
        raise DatabaseUnavailableError("the database does not work: send the request again") from error


def cause(error: Exception) -> object:
    """The database's own error: SQLAlchemy's would quote the stored text."""
    return getattr(error, "orig", error)


def open_database(url: str) -> Engine:
    """Connect to the database and bring its tables up to date. Any number of processes may do so at once.

    ``url`` is SQLAlchemy's. Raises UserError for a URL that SQLAlchemy does not understand.
    """
    try:
        # parameters are personal data, which errors and logs must not show
        engine = create_engine(
            url,
            pool_pre_ping=not url.startswith("sqlite"),
            hide_parameters=True,
            json_serializer=_json,
            json_deserializer=_parsed,
        )
    except Exception as error:
        raise UserError(
            f"the database {url.partition('://')[0]}://... cannot be used: {error}; expected sqlite:///FILE or "
            "postgresql+psycopg2://USER@HOST/NAME"
        ) from error
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
        _watch_file(engine)
    with _one_at_a_time(engine) as connection:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return engine


def _json(value: Any) -> str:
    return json_codec.dump(value).decode()


def _parsed(text: str) -> Any:
    """Stored JSON; a row of an earlier version may hold NaN, which only the standard library reads."""
    try:
        return json_codec.parse(text)
    except ValueError:
        return json.loads(text)


def _prepare_sqlite(engine: Engine) -> None:
    """Write-ahead logging, durable commits, and transactions that take the write lock when they begin.

    A transaction that reads first and writes later would fail at once if another one wrote in between. One that only
    reads takes no lock.
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
    """Leave connections to an SQLite file that was removed or replaced: what they wrote would be lost without a word.

    A file that was there and is gone is not made anew, because it would have no tables.
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
            raise DisconnectionError(f"the database file {file} is another one")


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def transactions(engine: Engine) -> Callable[[], AbstractContextManager[Session]]:
    """What begins a transaction that may write."""
    return sessionmaker(engine, expire_on_commit=False).begin


def readings(engine: Engine) -> Callable[[], AbstractContextManager[Session]]:
    """What begins a transaction that only reads: on SQLite it waits for nobody, and nobody waits for it."""
    return sessionmaker(engine.execution_options(**{_READS: True}), expire_on_commit=False).begin


@contextmanager
def _one_at_a_time(engine: Engine) -> Iterator[Any]:
    """A transaction in which only this process upgrades the tables."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
        yield connection
