"""What an exploration that was broken off has stored already, so that its repetition goes on from there."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rft_platform.errors import StorageError
from rft_platform.experience.record import RolloutRow
from rft_platform.experience.rounds import round_key
from rft_platform.rollout.identity import group_id
from rft_platform.rollout.report import RolloutBatch, RolloutReport, row_counts
from rft_platform.rounds.judge import NOTE as JUDGED
from rft_platform.rounds.policy import Policy
from rft_platform.rounds.project import Project
from rft_platform.tasks.task import Task

NOTE = "explore"

_log = logging.getLogger(__name__)


class StoredRollouts:
    """The stored batches of a round whose exploration, or the judgement after it, has not ended.

    A round that was explored and judged to its end is explored anew when it is repeated; so are batches of other
    weights or tasks than the repetition would take.
    """

    def __init__(self, project: Project, round_number: int, policies: Mapping[str | None, Policy]) -> None:
        """``policies`` explore, by the names that rows have; None: the first."""
        self._project, self._round = project, round_number
        self._versions = {name: policy.policy_version for name, policy in policies.items()}
        store = project.store
        self._note = None if store.has_note(round_number, JUDGED) else store.read_note(round_number, NOTE)
        self._anew = False
        self._groups: dict[str, list[RolloutRow]] = {}
        for row in _rows_of_unfinished(project, round_number):
            self._groups.setdefault(row.group_id, []).append(row)

    def batch(self, number: int, tasks: Sequence[Task]) -> RolloutBatch | None:
        """The rollouts of a batch of tasks; None where they are not there, or would not be made so now."""
        groups = {group_id(self._round, number, index): task for index, task in enumerate(tasks)}
        rows = [row for name in groups for row in self._groups.get(name, ())]
        fits = all(
            row.task_id == groups[row.group_id].task_id and row.policy_version == self._versions.get(row.policy)
            for row in rows
        )
        if not rows or not fits:
            self._anew = True
            return None
        _log.info("%s goes on with %d stored rollouts of batch %d", round_key(self._round), len(rows), number)
        return RolloutBatch(rows, self._report(rows, len(tasks)))

    @property
    def explored(self) -> dict[str, Any] | None:
        """The report of an exploration that had ended, where all batches that were asked for are its own."""
        return None if self._anew else self._note

    def _report(self, rows: Sequence[RolloutRow], tasks: int) -> RolloutReport:
        """What the rows still say; errors and times of their making are not known any more."""
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
    """Rows of a round that lacks a note; none where they cannot be read: then all are made anew."""
    if project.store.has_note(round_number, NOTE) and project.store.has_note(round_number, JUDGED):
        return []
    try:
        return project.store.rollout_rows(round_number)
    except StorageError as error:
        _log.warning("%s is explored anew: %s", round_key(round_number), error)
        return []
