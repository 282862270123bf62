"""Dynamic sampling: sample further task batches until enough groups carry a signal (DAPO, arXiv 2503.14476)."""

from collections.abc import Sequence
from typing import Any

from rft_platform.experience.record import RolloutRow
from rft_platform.judging.apply import judge_runs
from rft_platform.judging.operators.surplus_groups import SURPLUS_GROUPS
from rft_platform.judging.pipeline import Pipeline
from rft_platform.judging.view import experiences_of
from rft_platform.rounds.auxiliary import auxiliaries_for_judge
from rft_platform.rounds.judge import judge_of
from rft_platform.rounds.operators import pipeline_of
from rft_platform.rounds.project import Project


class SignalCount:
    """Counts the groups of a round that the experience pipeline would train on, one task batch after the other.

    The configured judge judges them for this count only; the judgement used for training is made in the judge phase.
    Without dynamic sampling nothing is judged, and one task batch is always enough.
    """

    def __init__(self, project: Project) -> None:
        whole = pipeline_of(project.settings)
        self.max_batches = project.batches.max_batches
        self._project = project
        self._judge = judge_of(project, project.taskset) if self.max_batches > 1 else None
        self._pipeline = Pipeline.of([entry for entry in whole.operators if entry.name != SURPLUS_GROUPS])
        self._wanted = self._found = self._sampled = 0

    def begin(self) -> None:
        """Start another explore batch: raise the number of wanted groups by its number of tasks."""
        self._wanted += self._project.batches.batch_size

    def enough(self, rows: Sequence[RolloutRow]) -> bool:
        """Count the groups of a task batch; returns whether the round has enough groups now.

        The surplus of an earlier explore batch of the round counts too. Raises the same errors as ``judge_runs``.
        """
        self._sampled += len({row.group_id for row in rows})
        if self.max_batches == 1:
            return True
        judge, tasks = self._judge, {task.task_id: task for task in self._project.tasks.tasks}
        needs_reward = self._project.settings.algorithm.needs_reward
        with auxiliaries_for_judge(self._project, judge if judge and judge.asks_models else None) as auxiliaries:
            runs = judge_runs(
                rows,
                tasks,
                judge,
                needs_reward=needs_reward,
                max_abs_reward=self._project.taskset.max_abs_reward,
                auxiliary_models=auxiliaries,
            )
        sound = {run.run_id: run for run in runs if run.error is None}
        judged = [row for row in rows if row.run_id in sound]
        self._found += self._pipeline.apply(experiences_of(judged, list(sound.values()))).trained_groups
        return self._found >= self._wanted

    def as_dict(self) -> dict[str, Any]:
        """For the note: groups wanted, groups sampled, groups with signal; empty without dynamic sampling."""
        if self.max_batches == 1:
            return {}
        found = {"groups_wanted": self._wanted, "groups_sampled": self._sampled, "groups_with_signal": self._found}
        spent = self._judge.state.usage.to_note() if self._judge and self._judge.state else {}
        return {**found, "groups_surplus": max(0, self._found - self._wanted), **spent}
