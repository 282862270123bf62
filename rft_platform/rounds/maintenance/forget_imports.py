"""Forget imported traces: erase their rows everywhere in a home, and name what was trained on them.

The rows are erased from the datasets of the imports, from the spans that were received, from the files that trainings
read (with the canaries made of them), and from the rollouts of imported tasks, where they stay as tombstones. The
traces are refused from then on: an import that is repeated leaves them out.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import atomic_path, digest_file
from rft_platform.config.home import Home
from rft_platform.model_registry.run_traces import delete_traces
from rft_platform.rounds.maintenance.row_erasure import Forgotten, erase_judge_errors, erase_rows, one_per_judgement
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import DatasetFile, drop_canaries, read, write
from rft_platform.rounds.reporting.lineage import descendants_of, trace_row, trained_with
from rft_platform.rounds.setup.demonstrations import EXPERTS, WARM_START
from rft_platform.tasks.dataset import task_id_of
from rft_platform.tasks.task import ORIGIN
from rft_platform.traces.datasets import TASKS
from rft_platform.traces.imports import Imports, import_kind, read_jsonl
from rft_platform.traces.origins import entries_of
from rft_platform.traces.received import ReceivedSpans

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.rounds.reporting.lineage import CheckpointRef


@dataclass(frozen=True, slots=True)
class Whose:
    """The traces to forget: those of a person, or those with some ids."""

    subject: str | None = None
    trace_ids: frozenset[str] = frozenset()

    def owns(self, entry: Mapping[str, Any]) -> bool:
        """Whether an entry of a row's ``imported_from`` is one of these traces."""
        return entry.get("id") in self.trace_ids or (self.subject is not None and entry.get("subject") == self.subject)

    def in_cell(self, cell: Any) -> bool:
        """Whether a cell of the column ``imported_from`` names one of these traces."""
        return any(map(self.owns, entries_of(cell)))

    @property
    def names(self) -> list[str]:
        """The ids and the subject."""
        return sorted({*self.trace_ids, *([self.subject] if self.subject is not None else [])})


@dataclass(slots=True)
class _Found:
    """What was erased so far."""

    rows: int = 0
    rounds: set[int] = field(default_factory=set)
    trained: "dict[str, CheckpointRef]" = field(default_factory=dict)

    def add(self, number: int, rows: int, trained: "Collection[CheckpointRef]") -> None:
        self.rows += rows
        self.rounds.add(number)
        self.trained |= {ref.checkpoint: ref for ref in trained}


def forget_imports(
    home: Home, project: Project | None, registry: "ModelRegistry | None", whose: Whose
) -> Forgotten | None:
    """Erase imported traces; may be repeated. ``project``: the one in the home, if there is one.

    Returns None if the home never had such traces.
    """
    imports, received, found = Imports(home), ReceivedSpans(home), _Found()
    ids = _ids(imports, whose) | received.traces_of_person(whose.subject)
    if project is not None:
        _erase_datasets(project, registry, whose, found)
        _erase_rollouts(project, registry, _tasks(imports, whose), found)
    refused = imports.refuses(whose.names)
    if (spans := received.erase({*whose.trace_ids, *ids})) or imports.names():
        found.rows += spans + len(imports.erase(whose.owns, [*whose.names, *ids]))
    if not found.rows and not refused:
        return None
    later = descendants_of(project.checkpoints, found.trained, registry) if project is not None else []
    return Forgotten(found.rows, tuple(sorted(found.rounds)), tuple(found.trained.values()), tuple(later))


def _ids(imports: Imports, whose: Whose) -> set[str]:
    """The ids of these traces: a later export may lack the subject."""
    return {entry["id"] for row in _task_rows(imports) for entry in row[ORIGIN] if whose.owns(entry)}


def _tasks(imports: Imports, whose: Whose) -> set[str]:
    """The ids of the tasks that are made of these traces."""
    return {task_id_of(row) for row in _task_rows(imports) if whose.in_cell(row[ORIGIN])}


def _task_rows(imports: Imports) -> Iterator[dict[str, Any]]:
    for name in imports.names():
        yield from read_jsonl(imports.file(TASKS, name))


def _erase_datasets(project: Project, registry: "ModelRegistry | None", whose: Whose, found: _Found) -> None:
    """Erase rows of the files that trainings read: of offline trainings, of the warm start, and of ``mix``."""
    store, start = project.store, project.store.round_folder(0)

    def trained(condition: Callable[[Mapping[str, Any]], bool]) -> "list[CheckpointRef]":
        return trained_with(project.checkpoints, condition, registry)

    for number in store.rounds():
        dataset = read(store, number).dataset
        if dataset is None:
            continue
        if rows := _erase_file(Path(dataset.path), whose, partial(_note_erased, project, number, dataset)):
            digest = dataset.digest
            found.add(number, rows, trained(lambda lineage: lineage.get("data_digest") == digest))  # noqa: B023
    if rows := _erase_file(start / WARM_START, whose, lambda *_: drop_canaries(store, 0)):
        found.add(0, rows, trained(lambda lineage: lineage.get("round") == 0))
    if rows := _erase_file(start / EXPERTS, whose):
        found.add(0, rows, trained(lambda lineage: lineage.get("round") != 0))


def _note_erased(project: Project, number: int, dataset: DatasetFile, file: Path, left: int) -> None:
    """Record the dataset's file as it will be without the erased rows, and remove what was made of them."""
    drop_canaries(project.store, number)
    erased = dataset.rows - left
    changed = replace(dataset, sha256=digest_file(file), bytes=file.stat().st_size, erased=erased)
    write(project.store, number, changed)


def _erase_file(file: Path, whose: Whose, before: Callable[[Path, int], None] = lambda *_: None) -> int:
    """Erase rows of a Parquet file; returns their number.

    ``before`` gets the new file and its number of rows before it replaces the old one: a killed ``rft forget`` that is
    repeated finds the rows as long as anything else is left to do.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.exists() or ORIGIN not in pq.read_schema(file).names:
        return 0
    table = pq.read_table(file)
    kept = [not whose.in_cell(cell) for cell in table[ORIGIN].to_pylist()]
    if not all(kept):
        with atomic_path(file) as temp:
            pq.write_table(table.filter(pa.array(kept)), temp, compression="zstd")
            before(temp, kept.count(True))
    return kept.count(False)


def _erase_rollouts(project: Project, registry: "ModelRegistry | None", tasks: set[str], found: _Found) -> None:
    """Make tombstones of the rollouts of tasks, and delete their traces in MLflow."""
    if not tasks:
        return
    if any(import_kind(taskset.path) == TASKS for taskset in project.config.buffer.explorer_input.explored.values()):
        drop_canaries(project.store, 0)  # the start's canary is made of tasks
    for number in project.store.rounds():
        if project.store.ledger(number).read().retired:
            erase_judge_errors(project.store, number)
            continue
        stored = project.store.read_rollouts(number, ["row_id", "run_id", "task_id"]).to_pylist()
        held = [row for row in stored if row["task_id"] in tasks]
        if not held:
            continue
        rows = {row["row_id"] for row in held}
        if registry is not None:
            runs = {row["run_id"] for row in held}
            delete_traces(registry.training_run(project.config.name), registry.tracking_uri, number, runs)
        erase_rows(project.store, number, rows, str)
        traces = [trace_row(row, project.store, project.checkpoints, registry) for row in
                  one_per_judgement(project, number, rows)]  # fmt: skip
        found.add(number, len(rows), [ref for trace in traces for ref in trace.trained])


def nothing_of(whose: Whose) -> UserError:
    """The error for traces that no import has."""
    names = ", ".join(map(repr, whose.names))
    return UserError(f"no imported trace has the subject or the id {names}")
