"""The production traffic of a project: its database, and the committed rows that its next round takes."""

import secrets
from functools import lru_cache

from sqlalchemy import Engine

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.common.personal_data import Redaction
from rft_platform.common.sqlite_files import database_file, network_file_system
from rft_platform.config.home import private_files
from rft_platform.config.schema.reward_formula import RewardFormula
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.round_rows import ChosenRows, RoundRule
from rft_platform.online.traffic.store import TrafficStore, many_stale
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.releases.released import serving_policy

_DATABASE = "traffic.db"


def traffic_store(project: Project, redaction: Redaction | None = None) -> TrafficStore:
    """The production traffic of an online project; the database is opened once per process.

    Texts pass through ``redaction`` before they are stored.
    """
    train_on = RewardFormula.parse(project.config.service.train_on)
    return TrafficStore(traffic_database(project), redaction=redaction, train_on=train_on)


def traffic_database(project: Project) -> Engine:
    """The database of production traffic and releases; it is opened once per process."""
    url = database_url(project)
    if (file := database_file(url)) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    return _open(url)


def database_url(project: Project) -> str:
    """The database's URL: ``experience_buffer.path``, or an SQLite file.

    The file is beside the checkpoints if ``checkpoint_root_dir`` is set, because a second home may share that folder.
    """
    given = project.config.buffer.trainer_input.experience_buffer.path
    if given is not None:
        return given
    folder = project.home.root / "online"
    if project.config.checkpoint_folder is not None and not (folder / _DATABASE).exists():
        folder = project.checkpoints / "buffer"
    return f"sqlite:///{folder / _DATABASE}"


def check_database(project: Project) -> None:
    """Raise UserError if two hosts would use an SQLite file on a network file system."""
    two_hosts = project.config.mode in ("serve", "train") and project.config.checkpoint_root_dir is not None
    file = database_file(database_url(project)) if two_hosts else None
    if file is not None and (kind := network_file_system(file)) is not None:
        raise UserError(
            f"the database of production traffic {file} is on a network file system ({kind}), where SQLite is not "
            "safe: set buffer.trainer_input.experience_buffer.path to a PostgreSQL URL, as in "
            "postgresql+psycopg2://rft@db/traffic"
        )


def home_id(project: Project) -> str:
    """The id of the project's home, made at the first call; the id stays the same if the home is moved."""
    return _made_once(project, "id")


def forget_key(project: Project) -> bytes:
    """The key that makes names for what ``rft forget`` erased. It lies in the home, not in the database."""
    return _made_once(project, "forget_key").encode()


def _made_once(project: Project, name: str) -> str:
    """A random text of the project's home, 32 hex digits, in a file that only its owner can read."""
    file = project.home.root / "online" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file):
        if not file.exists():
            with private_files():
                write_text(file, secrets.token_hex(16))
        return file.read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def _open(url: str) -> Engine:
    return open_database(url)


def next_choice(project: Project) -> ChosenRows:
    """The committed rows of production traffic that the next round would take now, and those it would leave out."""
    return traffic_store(project).next_choice(round_rule(project))


def stale_rows(project: Project) -> str | None:
    """What to change if many rows of an online project became stale; else None."""
    return many_stale(traffic_store(project).counts()) if project.config.online else None


def round_rule(project: Project) -> RoundRule:
    """How the next round chooses its rows among the committed ones."""
    service = project.config.service
    return RoundRule(
        project.batches.experiences_a_round,
        oldest_trainable(project),
        service.most_choices,
        service.task_share,
        service.subject_share,
        service.tenant_share,
    )


def oldest_trainable(project: Project) -> int | None:
    """The oldest policy version whose rows the next round may train on; None: of any version.

    The largest age (``synchronizer.max_staleness``) counts from the project's version that serves; if none serves,
    from the newest released one. Traffic has no rows of newer versions.
    """
    limit = project.config.synchronizer.max_staleness
    if limit is None:
        return None
    serving = serving_policy(project)
    return None if serving is None else serving.policy_version - limit
