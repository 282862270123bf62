"""Forget a person: erase the text and tokens of their production traffic everywhere, and name what was trained on it.

The weights do not change. The report names every model version that was trained on the person's rows, and its
descendants. An erased row stays as a tombstone without a learning signal: row ids, rewards and versions stay, so that
lineage still names the weights that were trained on it. The ledger keeps the digests of the old files, so the round's
digest does not change. Clients may name a task after a person: tasks and runs of erased rows are renamed, in all rows
of the task, so that its runs still form one group.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rft_platform.common.errors import UserError
from rft_platform.experience.file_ledger import Contents, Ledger
from rft_platform.experience.file_names import round_key
from rft_platform.experience.parquet import read_table, write_table
from rft_platform.experience.record import JudgedRow, RolloutRow, row_id
from rft_platform.experience.schema import (
    JUDGED_SCHEMA,
    ROLLOUT_SCHEMA,
    judged_to_table,
    rows_to_table,
    table_to_judged,
    table_to_rows,
)
from rft_platform.inference.canary import Canary
from rft_platform.model_registry.run_traces import delete_traces
from rft_platform.online.releases.exchange import followed_home, publisher_of
from rft_platform.online.traffic.database import Call
from rft_platform.online.traffic.demonstrations import erase_demonstrations
from rft_platform.online.traffic.erasure import Person, TrafficErasure
from rft_platform.online.traffic.project_traffic import forget_key, traffic_database, traffic_store
from rft_platform.online.traffic.round_rows import run_name
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish, published
from rft_platform.rounds.reporting.lineage import trace_row, trained_with
from rft_platform.rounds.train import CORRECTIONS_UNTIL

if TYPE_CHECKING:
    import pyarrow as pa

    from rft_platform.experience.store import ExperienceStore
    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.rounds.reporting.lineage import CheckpointRef


_TOKEN = 0  # token id of an erased response: a response has at least one token
TOMBSTONE = "erased"  #: ``finish_reason`` of an erased row

Rename: TypeAlias = Callable[[str], str]
Row = TypeVar("Row", RolloutRow, JudgedRow)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was erased, and the checkpoints that were trained on the erased rows."""

    rows: int
    rounds: tuple[int, ...]
    trained: "tuple[CheckpointRef, ...]"  # checkpoints whose training read the rows
    descendants: "tuple[CheckpointRef, ...]"  # later checkpoints that descend from those

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def forget(project: Project, registry: "ModelRegistry | None", subject: str, tenant: str | None = None) -> Forgotten:
    """Erase a person's calls from the database, the Parquet files and the notes; may be repeated.

    Raises UserError for a project without production traffic, a person without calls, while a round collects some of
    their rows, and without ``tenant`` if calls of several tenants name the subject.
    """
    if not project.config.online:
        raise UserError("this project serves no production traffic, and no other rows have a subject")
    if (place := followed_home(project.home)) is not None:
        raise UserError(f"the rows of this project are in the home that publishes at {place}: run `rft forget` there")
    publisher = publisher_of(project)
    traffic, person = TrafficErasure(traffic_database(project)), Person(subject, forget_key(project), tenant)
    calls = traffic.forget(person)
    if not calls:
        of_tenant = "" if tenant is None else f" of tenant {tenant!r}"
        raise UserError(f"no recorded call{of_tenant} names the subject {subject!r}")
    by_round: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call.batch is not None:
            by_round[call.batch].append(call)
    trained: dict[str, CheckpointRef] = {}
    descendants: dict[str, CheckpointRef] = {}
    for number, held in sorted(by_round.items()):
        rows = [row_id(call.msg_id, 0, call.choice) for call in held]
        if registry is not None:
            runs = {run_name(call) for call in held}
            delete_traces(registry.training_run(project.config.name), registry.tracking_uri, number, runs)
        _erase_canaries(project, _erase_rows(project.store, number, rows, person.erased))
        for row in _traced(project, number, set(rows)):
            trace = trace_row(row, project.store, project.checkpoints, registry)
            trained |= {ref.checkpoint: ref for ref in trace.trained}
            descendants |= {ref.checkpoint: ref for ref in trace.descendants}
    for ref in _trained_on_corrections(project, registry, {call.msg_id for call in calls}):
        trained.setdefault(ref.checkpoint, ref)
    traffic.forget_names(person)
    traffic.compact()
    if publisher is not None:
        publisher.step()  # the serving host has copies of the canaries
    found = Forgotten(
        len(calls),
        tuple(sorted(by_round)),
        tuple(trained.values()),
        tuple(ref for folder, ref in descendants.items() if folder not in trained),
    )
    rounds = ", ".join(map(round_key, found.rounds)) or "no round"
    said = f"{found.rows} calls of one subject were erased; rows of {rounds}"
    traffic_store(project).log("forgotten", said, **found.to_json())
    return found


def _trained_on_corrections(
    project: Project, registry: "ModelRegistry | None", msg_ids: set[str]
) -> "list[CheckpointRef]":
    """Erase the demonstrations made of these messages; returns the checkpoints whose training read one."""
    first = erase_demonstrations(project, msg_ids)
    if first is None:
        return []
    return trained_with(project.checkpoints, lambda lineage: lineage.get(CORRECTIONS_UNTIL, 0) >= first, registry)


def _traced(project: Project, number: int, rows: set[str]) -> set[str]:
    """One of the erased ``rows`` per judgement of the round, chosen from the rows that the judgement kept.

    A training of the round read all rows that its judgement kept, so one of them is enough to find its checkpoint.
    """
    found = set[str]()
    for version in project.store.judge_versions(number):
        kept = (row.row_id for row in project.store.judged_rows(number, version) if row.dropped_by is None)
        found |= {next((row_id for row_id in kept if row_id in rows), "")} - {""}
    return found


def _erase_canaries(project: Project, erased: list[list[int]]) -> None:
    """Remove erased sequences from the canary checks of all published policies."""
    gone = {tuple(sequence) for sequence in erased}
    for number in project.store.rounds() if gone else ():
        policy = published(project.store, number)
        if policy is None or policy.canary is None:
            continue
        pairs = zip(policy.canary.sequences, policy.canary.logprobs, strict=True)
        kept = [(ids, logprobs) for ids, logprobs in pairs if tuple(ids) not in gone]
        if len(kept) < len(policy.canary.sequences):
            publish(project.store, _with_canary(policy, kept))


def _with_canary(policy: Policy, kept: list[tuple[list[int], list[float]]]) -> Policy:
    canary = Canary([ids for ids, _ in kept], [logprobs for _, logprobs in kept]) if kept else None
    return replace(policy, canary=canary)


def _erase_rows(
    store: "ExperienceStore", round_number: int, row_ids: Collection[str], rename: Rename
) -> list[list[int]]:
    """Erase rows of a round from its files, and delete the files that held them; may be repeated.

    ``rename`` gives tasks and runs of the rows another name, and leaves a name that it gave unchanged. Returns the
    token ids that the rows had, prompt and response together.
    """
    wanted, ledger, erased = set(row_ids), store.ledger(round_number), list[list[int]]()
    with ledger.change() as contents:
        for name in contents.rollouts():
            rows = table_to_rows(read_table(ledger.folder / name, ROLLOUT_SCHEMA))
            found = [row for row in rows if row.row_id in wanted and row.call.finish_reason != TOMBSTONE]
            erased += [[*row.call.prompt_ids, *row.call.response_ids] for row in found]
            kept = _renamed([_tombstone(row) if row in found else row for row in rows], wanted, rename)
            if kept != rows:
                _rewrite(ledger, contents, name, rows_to_table(kept))
        for name in contents.judgements():
            judged = table_to_judged(read_table(ledger.folder / name, JUDGED_SCHEMA))
            renamed = _renamed(judged, wanted, rename)
            if any(one.group_id != other.group_id for one, other in zip(renamed, judged, strict=True)):
                _rewrite(ledger, contents, name, judged_to_table(renamed))
        for name in list(contents.superseded):
            if name not in contents.files:
                (ledger.folder / name).unlink(missing_ok=True)
                del contents.superseded[name]
    return erased


def _rewrite(ledger: Ledger, contents: Contents, name: str, table: "pa.Table") -> None:
    """Replace a file; its entry keeps the digest of the original one."""
    sources = contents.files[name].sources(name)
    ledger.land(contents, name, partial(write_table, table))
    contents.files[name] = replace(contents.files[name], made_of=sources)
    ledger.save(contents)


def _renamed(rows: list[Row], wanted: Collection[str], rename: Rename) -> list[Row]:
    """The rows, with other names for the tasks of the ``wanted`` rows and for the runs of these tasks."""
    groups = {row.group_id for row in rows if row.row_id in wanted}
    return [_with_names(row, rename) if row.group_id in groups else row for row in rows]


def _with_names(row: Row, rename: Rename) -> Row:
    renamed = replace(row, group_id=rename(row.group_id), run_id=rename(row.run_id))
    return replace(renamed, task_id=rename(renamed.task_id)) if isinstance(renamed, RolloutRow) else renamed


def _tombstone(row: RolloutRow) -> RolloutRow:
    call = replace(
        row.call,
        prompt_ids=[_TOKEN],
        response_ids=[_TOKEN],
        rollout_logprobs=[0.0],
        finish_reason=TOMBSTONE,
        messages=[],
        tools=[],
        response={"role": "assistant", "content": ""},
    )
    return replace(row, call=call, loss_mask=[False], run_output=None)
