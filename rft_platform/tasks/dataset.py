"""Load a taskset: convert rows to tasks, drop and report invalid rows, compute the content's digest.

``find_leaks`` finds evaluation tasks that were trained on.
"""

import difflib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_json
from rft_platform.config.schema.buffer import default_name
from rft_platform.openai_api.messages import text_of
from rft_platform.tasks.sources import LocatedRow, located_rows, with_nested
from rft_platform.tasks.task import ORIGIN, Task

LISTED = 10  # rows listed in a report
_MEANINGS = {"prompt_key": "question", "response_key": "reference answer"}


class MissingColumnsError(UserError):
    """A dataset lacks columns; ``keys`` are the keys of ``format`` that name them."""

    def __init__(self, message: str, keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


@dataclass(slots=True)
class DatasetReport:
    """Counts of read and dropped rows. Rows are named FILE:LINE, or FILE:NUMBER (from 1) if the file is not text."""

    source: str
    columns: tuple[str, ...] = ()
    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    dropped_rows: dict[str, list[str]] = field(default_factory=dict)  # by reason: the first few

    def drop(self, reason: str, row: str) -> None:
        """Count a dropped row."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if self.dropped[reason] <= LISTED:
            self.dropped_rows.setdefault(reason, []).append(row)

    def left_out(self) -> str:
        """A message about the dropped rows; empty if none were dropped."""
        return f"left out {self.examples()} of {self.rows:,} rows" if self.dropped else ""

    def examples(self) -> str:
        """A message about the dropped rows, with the first locations of each reason."""
        return ", ".join(
            f"{count:,} {reason} (first: {', '.join(self.dropped_rows[reason][:3])})"
            for reason, count in sorted(self.dropped.items())
        )


@dataclass(frozen=True, slots=True)
class TaskDataset:
    """The tasks in file order (with unique ids), their digest, and the report.

    The digest is the data version. It includes the order, which determines the tasks of a batch, and the column
    mapping, which determines the tasks themselves.
    """

    tasks: tuple[Task, ...]
    digest: str
    report: DatasetReport

    def by_id(self) -> dict[str, Task]:
        """Map ``task_id`` to task."""
        return {task.task_id: task for task in self.tasks}


def load_tasks(
    path: str,
    *,
    name: str | None = None,
    split: str = "train",
    subset_name: str | None = None,
    prompt_key: str | None = "question",
    response_key: str | None = "answer",
    limit: int | None = None,
    section: str | None = None,
) -> TaskDataset:
    """Load a file, a folder of split files or a Hugging Face dataset as tasks.

    Args:
        path: location of the rows; relative to the current folder.
        name: name of the taskset; default: the name of the file or dataset, with the split.
        split: file of a folder, or split of a Hugging Face dataset; unused for a single file.
        subset_name: subfolder of the folder, or configuration of a Hugging Face dataset.
        prompt_key: column with the prompt: text, or a list with one message of the user, perhaps after a system
            message; None: the prompt is the row itself as JSON text. Names with dots lead into nested columns.
        response_key: column with the reference answer; None: the tasks have none.
        limit: keep only the first ``limit`` tasks.
        section: section of the configuration that demonstrations belong to, named in errors; None: a taskset.

    Raises:
        UserError: nothing found, unreadable rows or prompts, an unknown column, or no task left.
    """
    located = located_rows(path, split, subset_name)
    report, rows = _collect(path, located, prompt_key, response_key, section)
    taskset = name or default_name(path, split)
    tasks = tuple(_task(taskset, row, prompt_key, response_key) for row in islice(rows, limit))
    digest = digest_json(
        {"tasks": [task.task_id for task in tasks], "prompt_key": prompt_key, "response_key": response_key}
    )
    return TaskDataset(tasks, digest, report)


def _collect(
    path: str, located: Iterable[LocatedRow], prompt_key: str | None, response_key: str | None, section: str | None
) -> tuple[DatasetReport, Iterable[dict[str, Any]]]:
    report, columns = DatasetReport(path), dict[str, None]()
    kept: dict[str, dict[str, Any]] = {}
    wanted = {"prompt_key": prompt_key, "response_key": response_key}
    settings = {name: column for name, column in wanted.items() if column is not None}
    keys = list(settings.values())
    for file, number, read in located:
        row, where = with_nested(read, keys), f"{path}{'' if path.endswith(file) else f'/{file}'}, line {number}"
        report.rows += 1
        columns.update(dict.fromkeys(row))
        without = next((key for key in keys if is_empty(row.get(key))), None)
        if without is None and prompt_key and is_empty(_prompt(row, prompt_key, where)[1]):
            without = prompt_key
        if without is not None:
            report.drop(f"without {without}", f"{file}:{number}")
        elif (identity := _identity(where, row)) in kept:
            report.drop("duplicate", f"{file}:{number}")
        else:
            kept[identity] = row
    report.columns = tuple(columns)
    _require(report, settings, section, kept=len(kept))
    return report, kept.values()


def _require(report: DatasetReport, settings: Mapping[str, str], section: str | None, kept: int) -> None:
    """Raise UserError if rows, columns or values are missing; ``settings`` maps keys of ``format`` to columns."""
    if report.rows == 0:
        raise UserError(f"{report.source}: the dataset is empty; expected at least one row")
    missing = {name: column for name, column in settings.items() if column not in report.columns}
    if missing:
        absent = " and no column ".join(map(repr, missing.values()))
        advice = "; set ".join(_advice(name, column, report.columns, section) for name, column in missing.items())
        raise MissingColumnsError(
            f"{report.source}: no column {absent}; the columns are {', '.join(report.columns)}. Set {advice}", missing
        )
    if kept == 0:
        raise UserError(f"{report.source}: all {report.rows} rows lack a value of {' or '.join(settings.values())}")


def _advice(name: str, column: str, columns: Sequence[str], section: str | None) -> str:
    """How to set key ``name`` of ``format``, whose ``column`` the dataset lacks."""
    near = difflib.get_close_matches(column, columns, n=1, cutoff=0.75)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    if section is not None:
        return f"{section}.format.{name} to the column of the {name.removesuffix('_key')}{hint}"
    return f"format.{name} of the taskset to the column of the {_MEANINGS[name]}{hint}, or to null if there is none"


def is_empty(value: Any) -> bool:
    """Whether a cell is empty: None, NaN or blank text."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _identity(where: str, row: dict[str, Any]) -> str:
    try:
        return task_id_of(row)
    except UnicodeEncodeError as error:
        raise half_pair(where, error) from None


def half_pair(where: str, error: UnicodeEncodeError) -> UserError:
    """The error for a row at ``where`` with half of a surrogate pair, which JSON can write."""
    half = ascii(error.object[error.start : error.end])
    return UserError(
        f"{where}: holds {half}, half of a surrogate pair, which is not a character; "
        "write the whole pair, or U+FFFD instead"
    )


def task_id_of(row: dict[str, Any]) -> str:
    """The id of the task that a row of a dataset is: a digest of its content, without where it was imported from."""
    return digest_json({name: value for name, value in row.items() if name != ORIGIN})[:16]


def _task(taskset: str, row: dict[str, Any], prompt_key: str | None, response_key: str | None) -> Task:
    answer = None if response_key is None else _text(row[response_key])
    system, prompt = _prompt(row, prompt_key, taskset)
    return Task(task_id_of(row), taskset, prompt, answer, row, system)


def _prompt(row: dict[str, Any], key: str | None, where: str) -> tuple[str | None, str]:
    """The system message of a row, if it has one, and its prompt; UserError beginning with ``where``."""
    if key is None:
        return None, json.dumps(row, ensure_ascii=False)
    cell = row.get(key)
    if not isinstance(cell, list | dict):
        return None, "" if cell is None else _text(cell)
    messages = cell if isinstance(cell, list) else [cell]
    roles = [message.get("role") if isinstance(message, dict) else type(message).__name__ for message in messages]
    if isinstance(cell, dict) or (roles and roles not in (["user"], ["system", "user"], ["developer", "user"])):
        found = f"the roles {', '.join(map(str, roles))}" if isinstance(cell, list) else "an object"
        raise UserError(
            f"{where}, {key}: expected text, or a list with one message of the user, perhaps after a system message; "
            f"got {found}. Write it so, or set format.prompt_key to null if your workflow reads the row itself"
        )
    try:
        *system, prompt = [text_of(message.get("content")) for message in messages] or [""]
    except UserError as error:
        raise UserError(f"{where}, {key}: {error}") from None
    return "".join(system) or None, prompt


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def find_leaks(train: Iterable[Task], evaluation: Iterable[Task], *, whole_rows: bool = False) -> list[Task]:
    """The evaluation tasks whose prompt is also a training prompt.

    The comparison ignores case, white space and Unicode form. ``whole_rows``: the evaluation tasks that equal a
    training task in every column, for workflows that read the whole row.
    """
    if whole_rows:
        ids = {task.task_id for task in train}
        return [task for task in evaluation if task.task_id in ids]
    seen = {normalise(task.prompt) for task in train}
    return [task for task in evaluation if normalise(task.prompt) in seen]


def normalise(prompt: str) -> str:
    """The normalised form in which prompts are compared."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())
