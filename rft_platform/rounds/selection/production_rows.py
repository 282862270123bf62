"""Online projects: the database of production traffic, and the rows that a round collects from it."""

import secrets
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Engine

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.common.sqlite_files import database_file, network_file_system
from rft_platform.config.home import private_files
from rft_platform.experience.record import LARGEST_TOP_K, ModelCall, RolloutRow, row_id
from rft_platform.rounds.project.project import Project
from rft_platform.serving.database import Call, open_database
from rft_platform.serving.incoming import ENGINE, TEMPLATE_HASH
from rft_platform.serving.rules.redaction import Redaction
from rft_platform.serving.traffic import TrafficStore
from rft_platform.tasks.task import Task

_DATABASE = "traffic.db"


def traffic_store(project: Project, redaction: Redaction | None = None) -> TrafficStore:
    """The production traffic of an online project; the database is opened once per process.

    Texts pass through ``redaction`` before they are stored.
    """
    return TrafficStore(traffic_database(project), redaction=redaction)


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


def rows_of_traffic(calls: list[Call], round_number: int) -> list[RolloutRow]:
    """Rollout rows of a round's calls: the calls of one task form a group, and the calls of one run are its steps.

    The last row of a run has the run's reward, which is the reward of the last call with feedback.
    """
    steps: Counter[str] = Counter()
    last: dict[str, RolloutRow] = {}
    rows = []
    for call in calls:
        run = run_name(call)
        row = _row(call, run, steps[run], round_number)
        steps[run] += 1
        last[run] = row
        rows.append(row)
    rewards = {run_name(call): call.reward for call in calls}
    for run, row in last.items():
        row.run_reward = rewards[run]
        row.run_output = row.call.response.get("content")
    return rows


def tasks_of_traffic(rows: Sequence[RolloutRow]) -> dict[str, Task]:
    """The tasks of an online round's rows, by task id. A judge gets the messages of a task's first request as the task.

    The tasks are made from the requests, because no dataset holds them.
    """
    tasks: dict[str, Task] = {}
    for row in rows:
        messages = row.call.messages
        prompt = next((str(each.get("content")) for each in reversed(messages) if each.get("role") == "user"), "")
        tasks.setdefault(row.task_id, Task(row.task_id, row.taskset, prompt, None, {"messages": messages}))
    return tasks


def _task_of(call: Call) -> str:
    """Name of the task; each tenant has its own tasks."""
    return f"{call.tenant}/{call.task_id}" if call.tenant else str(call.task_id)


def run_name(call: Call) -> str:
    """Name of the run; each further choice of an answer is a separate run.

    The name is unique, because its last part is the run id, in which slashes are escaped.
    """
    run = str(call.run_id).replace("%", "%25").replace("/", "%2F")
    return f"online{f':{call.choice}' if call.choice else ''}/{_task_of(call)}/{run}"


def _row(call: Call, run: str, step: int, round_number: int) -> RolloutRow:
    recorded: dict[str, Any] = dict(call.model_call)
    engine, template_hash = recorded.pop(ENGINE), recorded.pop(TEMPLATE_HASH)
    model_call = ModelCall(**recorded)
    model_call.top_k = min(model_call.top_k, LARGEST_TOP_K)
    return RolloutRow(
        row_id=row_id(call.msg_id, 0, call.choice),
        task_id=_task_of(call),
        taskset="online",
        group_id=f"online/{_task_of(call)}",
        run_id=run,
        step=step,
        round=round_number,
        engine=engine,
        template_hash=template_hash,
        call=model_call,
        loss_mask=[not model_call.constrained] * len(model_call.response_ids),
        truncated=model_call.finish_reason == "length",
    )


@lru_cache(maxsize=4)
def _open(url: str) -> Engine:
    return open_database(url)
