"""Forget a person: erase the text and tokens of their production traffic everywhere, and name what was trained on it.

The weights do not change. The report names every model version that was trained on the person's rows, and its
descendants. An erased row stays as a tombstone without a learning signal: row ids, rewards and versions stay, so that
lineage still names the weights that were trained on it. The ledger keeps the digests of the old files, so the round's
digest does not change. Clients may name a task after a person: tasks and runs of erased rows are renamed, in all rows
of the task, so that its runs still form one group.
"""

from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING

from rft_platform.common.errors import UserError
from rft_platform.experience.file_names import round_key
from rft_platform.experience.record import row_id
from rft_platform.model_registry.run_traces import delete_traces
from rft_platform.online.releases.exchange import followed_home, publisher_of
from rft_platform.online.traffic.database import Call
from rft_platform.online.traffic.demonstrations import erase_demonstrations
from rft_platform.online.traffic.erasure import Person, TrafficErasure
from rft_platform.online.traffic.project_traffic import forget_key, traffic_database, traffic_store
from rft_platform.online.traffic.round_rows import run_name
from rft_platform.rounds.maintenance.row_erasure import Forgotten, erase_rows, one_per_judgement
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.reporting.lineage import trace_row, trained_with
from rft_platform.rounds.train import CORRECTIONS_UNTIL

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.rounds.reporting.lineage import CheckpointRef


class UnknownSubjectError(UserError):
    """No recorded call and no preference names the subject."""


def forget(project: Project, registry: "ModelRegistry | None", subject: str, tenant: str | None = None) -> Forgotten:
    """Erase a person's calls from the database, the Parquet files and the notes; may be repeated.

    The comments of a person who compared answers of others are erased, too. Raises UserError for a project without
    production traffic, an unknown person, while a round collects some of their rows, and without ``tenant`` if several
    tenants name the subject.
    """
    if not project.config.online:
        raise UserError("this project serves no production traffic, and no other rows have a subject")
    if (place := followed_home(project.home)) is not None:
        raise UserError(f"the rows of this project are in the home that publishes at {place}: run `rft forget` there")
    publisher = publisher_of(project)
    traffic, person = TrafficErasure(traffic_database(project)), Person(subject, forget_key(project), tenant)
    calls = traffic.forget(person)
    if not calls and not traffic.has_rated(person):
        of_tenant = "" if tenant is None else f" of tenant {tenant!r}"
        raise UnknownSubjectError(f"no recorded call{of_tenant} names the subject {subject!r}, and no preference does")
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
        erase_rows(project.store, number, rows, person.erased)
        for row in one_per_judgement(project, number, set(rows)):
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
    summary = f"{found.rows} calls of one subject were erased; rows of {rounds}"
    traffic_store(project).log("forgotten", summary, **asdict(found))
    return found


def _trained_on_corrections(
    project: Project, registry: "ModelRegistry | None", msg_ids: set[str]
) -> "list[CheckpointRef]":
    """Erase the demonstrations made of these messages; returns the checkpoints whose training read one."""
    first = erase_demonstrations(project, msg_ids)
    if first is None:
        return []
    return trained_with(project.checkpoints, lambda lineage: lineage.get(CORRECTIONS_UNTIL, 0) >= first, registry)
