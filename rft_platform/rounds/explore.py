"""Explore stage of a round: choose the policy that explores, roll out its explore batches, and store the rows.

A retry after an interruption continues from the rollouts that are stored already. In an online round ``collect`` takes
the committed rows of production traffic instead, and corrections that no round has taken become its demonstrations.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import MappingProxyType

from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.progress import announce, report
from rft_platform.experience.file_names import round_key
from rft_platform.experience.record import RolloutRow
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rollout.recording.history import group_id, repeat_of, run_id
from rft_platform.rollout.runner.report import RolloutBatch, RolloutReport, row_counts
from rft_platform.rollout.runner.run_rollouts import nothing_whole, run_rollouts
from rft_platform.rollout.runner.single_turn import InFlight
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel
from rft_platform.rounds.planning.plan import versions_ahead
from rft_platform.rounds.planning.project_state import Launches, observe
from rft_platform.rounds.project.code_version import keep_user_code
from rft_platform.rounds.project.policy import deploy, explorer_of, is_published, take_snapshot
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, Judged, Policy, read, snapshot_of, write
from rft_platform.rounds.project.repair import repair_on_failure
from rft_platform.rounds.releases.training_start import settle_start
from rft_platform.rounds.selection.task_selection import SignalCount, TaskSelection
from rft_platform.rounds.setup.side_engines import serving_auxiliaries, serving_policies
from rft_platform.rounds.setup.taskset_binding import how_to_run
from rft_platform.tasks.task import Task

_log = logging.getLogger(__name__)


def explore(project: Project, engine: PolicyEngine, policy: Policy, round_number: int) -> Explored:
    """Roll out every explore batch of a round with ``policy`` and store the rows; returns the round's report.

    The other policies take part in the versions that the round's snapshots name. A repeated call produces the same rows
    with the same ids.
    """
    config = project.config
    with repair_on_failure(project, policy):
        canary_delta = deploy(engine, policy)
    started = perf_counter()
    _, *others = project.policies
    policies = {policy.name: policy} | {name: snapshot_of(project.store, round_number, name) for name in others}
    stored = StoredRollouts(project, round_number, policies)
    with serving_auxiliaries(project) as auxiliaries, serving_policies(project, policies) as engines:
        roll_out = partial(_roll_out, project, engine, auxiliaries, engines, round_number)
        selection, signal = TaskSelection(project, round_number, policy.round), SignalCount(project)
        batches: list[RolloutBatch] = []
        for batch in range(config.synchronizer.batches_a_round):
            if project.batches.in_flight > 1:
                flight = _Flight(project, round_number, batch, policy.policy_version)
                batches.append(flight.explore(roll_out, selection, stored))
            else:
                batches += _explore_batch(project, roll_out, selection, signal, stored, round_number, batch)
    if stored.explored is not None:
        announce(f"{round_key(round_number)}: its rollouts are stored already; only their judgement is missing")
        return stored.explored
    total = RolloutReport.merge([found.report for found in batches])
    if not total.rows:
        errors = [found.last_error for found in batches if found.last_error is not None]
        cause = errors[-1] if errors else None
        kept = project.settings.limits.group_policy
        raise nothing_whole(round_key(round_number), total, kept, project.batches.repeat_times, cause)
    if failures := total.failures(project.batches.repeat_times):
        _log.warning("%s: %s", round_key(round_number), failures)
    figures = {name: value for name, value in total.as_dict().items() if name not in Explored.__dataclass_fields__}
    versions = {f"policy_version/{name}": policies[name].policy_version for name in others}
    explored = Explored(
        rows=total.rows,
        policy_version=policy.policy_version,
        older_groups=_older_groups(batches, policy.policy_version) if project.batches.in_flight > 1 else {},
        policy_round=policy.round,
        weights_digest=policy.weights_digest,
        workflow_code=keep_user_code(project),
        task_selection=selection.taken(),
        tokens_per_s=total.tokens_per_s,
        seconds=perf_counter() - started,
        figures={**figures, **versions, "canary_delta": canary_delta, **signal.as_dict()},
    )
    write(project.store, round_number, explored)
    return explored


def _explore_batch(
    project: Project,
    roll_out: Callable[[int, Sequence[Task]], RolloutBatch],
    selection: TaskSelection,
    signal: SignalCount,
    stored: "StoredRollouts",
    round_number: int,
    batch: int,
) -> list[RolloutBatch]:
    """The rollouts of an explore batch: one task batch, and further ones until enough groups carry a signal.

    The first task batch uses the explore batch's number in run ids; further ones use numbers above those of the round's
    explore batches. Rows are stored before they are judged: if the judge does not answer, no rollouts are lost.
    """
    found: list[RolloutBatch] = []
    rows: list[RolloutRow] = []
    signal.begin()
    for attempt in range(signal.max_batches):
        number, tasks = batch + attempt * project.config.synchronizer.batches_a_round, selection.next()
        known = stored.batch(number, tasks)
        found.append(known or roll_out(number, tasks))
        rows += found[-1].rows
        if known is None:
            project.store.write_rollouts(round_number, batch, rows)
        if signal.enough(found[-1].rows):
            break
    if known is not None:  # the stored file may hold rows of further task batches, which are not used now
        project.store.write_rollouts(round_number, batch, rows)
    return found


def _roll_out(
    project: Project,
    engine: PolicyEngine,
    auxiliaries: Mapping[str, AuxiliaryModel],
    engines: Mapping[str, PolicyEngine],
    round_number: int,
    batch: int,
    tasks: Sequence[Task],
    in_flight: InFlight | None = None,
) -> RolloutBatch:
    batches = project.batches
    what = f"{round_key(round_number)} rollouts"
    report(what, 0, (len(tasks) if in_flight is None else in_flight.enough) * batches.repeat_times)
    return run_rollouts(
        engine,
        tasks,
        how_to_run(project),
        round=round_number,
        batch=batch,
        repeat_times=batches.repeat_times,
        seed=project.config.seed,
        limits=project.settings.limits,
        auxiliary_models=auxiliaries,
        policies=engines,
        greedy_first=project.settings.algorithm.greedy_run,
        on_progress=lambda done, total: report(what, done, total),
        in_flight=in_flight,
    )


@dataclass(frozen=True, slots=True)
class _Flight:
    """An explore batch that continues the unfinished answers of the batch before and leaves some for the next one.

    ``batches_in_flight`` times ``batch_size`` tasks are sampled at the same time; ``batch_size`` of them complete the
    batch. So every batch gives as many groups as it would otherwise, and the last one leaves none.
    """

    project: Project
    round: int
    batch: int  # number within the round
    version: int  # of the weights that explore

    def explore(
        self,
        roll_out: Callable[[int, Sequence[Task], InFlight], RolloutBatch],
        selection: TaskSelection,
        stored: "StoredRollouts",
    ) -> RolloutBatch:
        """The rollouts of the batch; their rows and the unfinished ones are stored."""
        project, size, carried = self.project, self.project.batches.batch_size, self._carried()
        tasks = [task for task, _ in carried]
        begun = {(place, repeat): row for place, (_, rows) in enumerate(carried) for repeat, row in rows.items()}
        while len(tasks) < min(project.batches.in_flight, self._batches_left()) * size:
            tasks += selection.next()
        ended = {
            run_id(self.round, self.batch, place, repeat): row.call.policy_version
            for (place, repeat), row in begun.items()
            if row.call.finish_reason != "abort"
        }
        if (known := stored.batch(self.batch, tasks, size, ended)) is not None:
            return known
        found = roll_out(self.batch, tasks, InFlight(size, begun))
        project.store.write_unfinished(self.round, self.batch, found.unfinished)
        project.store.write_rollouts(self.round, self.batch, found.rows)
        return found

    def _batches_left(self) -> int:
        """Explore batches of the whole run from this one on."""
        project = self.project
        return (project.rounds_budget - self.round + 1) * project.batches.batches_a_round - self.batch

    def _carried(self) -> list[tuple[Task, dict[int, RolloutRow]]]:
        """The tasks that the batch before left unfinished, each with its rows by repeat.

        A task is left out if a token of it will be older than ``synchronizer.max_staleness`` when it is trained on, or
        if the taskset no longer has it.
        """
        sync, tasks = self.project.config.synchronizer, self.project.tasks.by_id()
        limit = sync.max_staleness
        trained = self.version + (0 if sync.dynamic else sync.offset_rounds * self.project.batches.steps_a_round)
        groups: dict[str, dict[int, RolloutRow]] = {}
        for row in self._left_before():
            groups.setdefault(row.group_id, {})[repeat_of(row.run_id)] = row
        found = []
        for rows in groups.values():
            task = tasks.get(next(iter(rows.values())).task_id)
            if task is not None and (limit is None or trained - _oldest_version(rows.values()) <= limit):
                found.append((task, rows))
        if len(found) < len(groups):
            _log.warning(
                "%s: %d unfinished tasks are not continued: their tokens are older than synchronizer.max_staleness "
                "allows, or they have left the taskset",
                round_key(self.round),
                len(groups) - len(found),
            )
        return found

    def _left_before(self) -> list[RolloutRow]:
        store = self.project.store
        if self.batch > 0:
            return store.unfinished_rows(self.round, self.batch - 1)
        return store.unfinished_rows(self.round - 1, self.project.batches.batches_a_round - 1) if self.round > 1 else []


def _older_groups(batches: Iterable[RolloutBatch], version: int) -> dict[str, int]:
    """The version of the oldest token of each group that has tokens of weights before ``version``."""
    groups: dict[str, list[RolloutRow]] = {}
    for row in (row for batch in batches for row in batch.rows):
        groups.setdefault(row.group_id, []).append(row)
    oldest = {name: _oldest_version(rows) for name, rows in groups.items()}
    return {name: int(found) for name, found in oldest.items() if found < version}


def _oldest_version(rows: Iterable[RolloutRow]) -> float:
    """The oldest version that sampled a token of the rows; infinity if they have no token."""
    sampled = (row.call for row in rows if row.call.response_ids)
    return min((min(call.token_versions or [call.policy_version or 0]) for call in sampled), default=math.inf)


def snapshot_for(project: Project, number: int) -> Policy:
    """Record the policies that a round explores with; returns the first.

    ``fixed``: the newest of round ``number - 1 - offset_rounds`` or later. ``dynamic_by_trainer``: the newest.
    ``dynamic_by_explorer``: the newest, chosen again after every ``sync_interval`` batches.
    """
    sync, store = project.config.synchronizer, project.store
    _, *others = project.policies
    for name in others:
        take_snapshot(store, number, sync.offset_rounds, name=name)
    if not sync.dynamic:
        restarted = settle_start(project, number) if project.config.restarts_after_refusal else None
        return take_snapshot(store, number, sync.offset_rounds, restarted)
    held = None
    if sync.sync_style == "dynamic_by_explorer" and (number - 1) % sync.sync_interval:
        held = _held_policy(project, number)
    return take_snapshot(store, number, number - 1, held)


def _held_policy(project: Project, number: int) -> Policy | None:
    """The policy of the previous batch; None if it is gone, or if its rows would be too old for their training."""
    store, limit = project.store, project.config.synchronizer.max_staleness
    held = read(store, number - 1).snapshot()
    if held is None or not is_published(store, held):
        return None
    if limit is not None:
        behind = explorer_of(store, number, number - 1).policy_version - held.policy_version
        if behind + versions_ahead(observe(project, Launches())) > limit:
            return None
    return held


class StoredRollouts:
    """The stored batches of a round whose exploration or judgement has not finished.

    A round that was explored and judged completely has no such batches: repeating it samples everything again, which
    ``Round.explore`` refuses once a training reads the rows. A stored batch is sampled again if the retry uses other
    weights or tasks.
    """

    def __init__(self, project: Project, round_number: int, policies: Mapping[str, Policy]) -> None:
        """``policies`` are those that explore, by name."""
        self._project, self._round = project, round_number
        self._versions = {name: policy.policy_version for name, policy in policies.items()}
        record = read(project.store, round_number)
        self._explored = None if record.has(Judged) else record.explored
        self._anew = False
        self._groups: dict[str, list[RolloutRow]] = {}
        for row in _rows_of_unfinished(project, round_number):
            self._groups.setdefault(row.group_id, []).append(row)

    def batch(
        self,
        number: int,
        tasks: Sequence[Task],
        enough: int | None = None,
        ended: Mapping[str, int | None] = MappingProxyType({}),
    ) -> RolloutBatch | None:
        """The stored rollouts of a task batch; None if they are missing or do not match the current policy or tasks.

        ``enough``: number of groups that complete the batch; default: all tasks. ``ended``: the version of each run
        whose answer an earlier batch completed.
        """
        groups = {group_id(self._round, number, index): task for index, task in enumerate(tasks)}
        rows = [row for name in groups for row in self._groups.get(name, ())]
        fits = all(
            row.task_id == groups[row.group_id].task_id
            and row.call.policy_version == ended.get(row.run_id, self._versions.get(row.call.policy))
            for row in rows
        )
        if not rows or not fits:
            self._anew = True
            return None
        _log.info("%s continues with %d stored rollouts of batch %d", round_key(self._round), len(rows), number)
        return RolloutBatch(rows, self._report(rows, len(tasks) if enough is None else enough))

    @property
    def explored(self) -> Explored | None:
        """The report of a finished exploration, if all requested batches were stored; otherwise None."""
        return None if self._anew else self._explored

    def _report(self, rows: Sequence[RolloutRow], tasks: int) -> RolloutReport:
        """The report as far as it can be computed from the rows, i.e. without errors and timings.

        Of the runs of a dropped task, one counts as failed: how many did is not stored.
        """
        wanted = self._project.batches.repeat_times
        runs = Counter(row.group_id for row in {row.run_id: row for row in rows}.values())
        lost = tasks - len(runs)
        return RolloutReport(
            runs=tasks * wanted,
            failed=lost + sum(wanted - count for count in runs.values()),
            stopped=0,
            retried=0,
            dropped_groups=lost,
            partial_groups=sum(count < wanted for count in runs.values()),
            seconds=0.0,
            cpu_s=0.0,
            engine_cpu_s=0.0,
            dropped_for={"failed": lost} if lost else {},
            **row_counts(rows),
        )


def _rows_of_unfinished(project: Project, round_number: int) -> list[RolloutRow]:
    """Rows of a round whose exploration or judgement is unfinished; none if they cannot be read."""
    record = read(project.store, round_number)
    if record.has(Explored) and record.has(Judged):
        return []
    try:
        return project.store.rollout_rows(round_number)
    except StorageError as error:
        _log.warning("%s is explored again: %s", round_key(round_number), error)
        return []


def collect(project: Project, round_number: int) -> Explored:
    """Write the round's rows of production traffic to the store, then mark them as consumed; returns the report.

    The database first records which rows the round takes. So a repeated call after a crash writes the same rows: no row
    is lost, and no row is used by two rounds. Raises StorageError if no row is committed.
    """
    started, traffic = perf_counter(), project.traffic
    if traffic is None:
        raise UserError("this project serves no production traffic: start one with `rft serve`")
    taken = traffic.take(round_number)
    rows = taken.rows
    demonstrations = traffic.demonstrations(round_number)
    project.store.write_rollouts(round_number, 0, rows)
    versions = [row.call.policy_version for row in rows if row.call.policy_version is not None]
    parent = settle_start(project, round_number)
    explored = Explored(
        rows=len(rows),
        policy_version=max(versions, default=parent.policy_version),
        policy_round=parent.round,
        weights_digest=parent.weights_digest,
        workflow_code=keep_user_code(project),
        seconds=perf_counter() - started,
        figures={
            "runs": len({row.run_id for row in rows}),
            "tasks": len({row.task_id for row in rows}),
            "subjects": taken.subjects,
            "demonstrations": demonstrations.rows,
            "tokens": sum(len(row.call.response_ids) for row in rows),
            "oldest_policy_version": min(versions, default=parent.policy_version),
        },
    )
    write(project.store, round_number, explored)
    traffic.consume(round_number)
    return explored
