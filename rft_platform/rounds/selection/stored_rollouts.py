"""Rollouts that an interrupted exploration has already stored, so that a retry continues from them."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rft_platform.common.errors import StorageError
from rft_platform.experience.file_names import round_key
from rft_platform.experience.record import RolloutRow
from rft_platform.rollout.recording.run_ids import group_id
from rft_platform.rollout.runner.report import RolloutBatch, RolloutReport, row_counts
from rft_platform.rounds.project.notes import EXPLORE, JUDGE
from rft_platform.rounds.project.policy import Policy
from rft_platform.rounds.project.project import Project
from rft_platform.tasks.task import Task

_log = logging.getLogger(__name__)


class StoredRollouts:
    """The stored batches of a round whose exploration or judgement has not finished.

    A round that was explored and judged completely has no such batches: repeating it samples everything again. A stored
    batch is sampled again if the retry uses other weights or tasks.
    """

    def __init__(self, project: Project, round_number: int, policies: Mapping[str, Policy]) -> None:
        """``policies`` are those that explore, by name."""
        self._project, self._round = project, round_number
        self._versions = {name: policy.policy_version for name, policy in policies.items()}
        store = project.store
        self._note = None if store.has_note(round_number, JUDGE) else store.read_note(round_number, EXPLORE)
        self._anew = False
        self._groups: dict[str, list[RolloutRow]] = {}
        for row in _rows_of_unfinished(project, round_number):
            self._groups.setdefault(row.group_id, []).append(row)

    def batch(self, number: int, tasks: Sequence[Task]) -> RolloutBatch | None:
        """The stored rollouts of a task batch; None if they are missing or do not match the current policy or tasks."""
        groups = {group_id(self._round, number, index): task for index, task in enumerate(tasks)}
        rows = [row for name in groups for row in self._groups.get(name, ())]
        fits = all(
            row.task_id == groups[row.group_id].task_id
            and row.call.policy_version == self._versions.get(row.call.policy)
            for row in rows
        )
        if not rows or not fits:
            self._anew = True
            return None
        _log.info("%s continues with %d stored rollouts of batch %d", round_key(self._round), len(rows), number)
        return RolloutBatch(rows, self._report(rows, len(tasks)))

    @property
    def explored(self) -> dict[str, Any] | None:
        """The report of a finished exploration, if all requested batches were stored; otherwise None."""
        return None if self._anew else self._note

    def _report(self, rows: Sequence[RolloutRow], tasks: int) -> RolloutReport:
        """The report as far as it can be computed from the rows, i.e. without errors and timings."""
        wanted = self._project.batches.repeat_times
        runs = Counter(row.group_id for row in {row.run_id: row for row in rows}.values())
        lost = tasks - len(runs)
        return RolloutReport(
            runs=tasks * wanted,
            failed=tasks * wanted - runs.total(),
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
    if project.store.has_note(round_number, EXPLORE) and project.store.has_note(round_number, JUDGE):
        return []
    try:
        return project.store.rollout_rows(round_number)
    except StorageError as error:
        _log.warning("%s is explored again: %s", round_key(round_number), error)
        return []
