"""Select the tasks of a round, one batch after the other, and decide how many batches the round takes.

``TaskSelection`` uses the taskset's selector. ``SignalCount`` implements dynamic sampling: further task batches until
enough groups carry a signal (DAPO, arXiv 2503.14476).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rft_platform.experience.record import RolloutRow
from rft_platform.experience.store import ExperienceStore
from rft_platform.judging.execution.columns import experiences_of
from rft_platform.judging.execution.experience_pipeline import Pipeline
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.judging.operators.surplus_groups import SURPLUS_GROUPS
from rft_platform.rounds.project.notes import SNAPSHOT
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.algorithm import pipeline_of
from rft_platform.rounds.setup.side_engines import auxiliaries_for_judge
from rft_platform.rounds.setup.taskset_binding import judge_of
from rft_platform.tasks.selectors.pass_history import Outcomes
from rft_platform.tasks.selectors.selector_registry import Moment, find_selector, select
from rft_platform.tasks.task import Task


class TaskSelection:
    """The task batches of one round.

    The batches depend on the seed, the earlier rounds, and the round of the exploring policy. A repeated round takes
    the same tasks, even if more has been stored since.
    """

    def __init__(self, project: Project, round_number: int, policy_round: int) -> None:
        self._project, self._round = project, round_number
        self._first = batches_before(project, round_number)
        self._history = _StoredHistory(project, round_number, self._first, policy_round)
        self._taken: list[list[str]] = []
        self._statistics: list[dict[str, float]] = []

    def next(self) -> list[Task]:
        """The next batch of tasks."""
        config, tasks, chooser = self._project.config, self._project.tasks.tasks, self._project.taskset.task_selector
        moment = Moment(
            batch_size=self._project.batches.batch_size,
            step=self._first + len(self._taken),
            round=self._round,
            round_step=len(self._taken),
            seed=config.seed if chooser.seed is None else chooser.seed,
            feature_keys=tuple(chooser.feature_keys),
        )
        chosen = select(chooser.selector_type, tasks, moment, self._history, chooser.args)
        self._taken.append([tasks[index].task_id for index in chosen.indices])
        self._statistics.append(dict(chosen.statistics))
        return [tasks[index] for index in chosen.indices]

    def as_dict(self) -> dict[str, Any]:
        """For the note: selector, number of batches in earlier rounds and in this one, tasks per batch, statistics."""
        names = dict.fromkeys(name for found in self._statistics for name in found)
        means = {name: sum(s[name] for s in self._statistics) / len(self._statistics) for name in names}
        return {
            "selector": self._project.taskset.task_selector.selector_type,
            "first_batch": self._first,
            "batches": len(self._taken),
            "statistics": means,
            "tasks": self._taken,
        }


def batches_before(project: Project, round_number: int) -> int:
    """Number of task batches taken before a round; dynamic sampling may take several per round."""
    own, last = (
        (project.store.read_note(number, "explore") or {}).get("task_selection")
        for number in (round_number, round_number - 1)
    )
    if own is not None:  # this round was explored before: keep its number even if the previous round changed
        return int(own["first_batch"])
    if last is None:
        return (round_number - 1) * project.config.synchronizer.batches_a_round
    return int(last["first_batch"]) + int(last["batches"])


def check_selector(project: Project) -> None:
    """Raise UserError if the selector does not exist, or if its options or columns do not fit the tasks."""
    chooser, tasks = project.taskset.task_selector, project.tasks.tasks
    find_selector(chooser.selector_type, chooser.args)
    moment = Moment(1, 0, 1, 0, 0, tuple(chooser.feature_keys))
    select(chooser.selector_type, tasks, moment, _NoHistory(), chooser.args)


class _NoHistory:
    """The history before the first round."""

    def outcomes(self, step: int, pass_reward: float) -> Outcomes:
        """No outcomes."""
        return Outcomes.of([], [])


class _StoredHistory:
    """The stored outcomes of the rounds up to the round of the policy that explored at a step."""

    def __init__(self, project: Project, round_number: int, first: int, policy_round: int) -> None:
        self._project, self._round, self._first, self._policy_round = project, round_number, first, policy_round
        self._cached_outcomes = lru_cache(maxsize=None)(self._read_outcomes)

    def outcomes(self, step: int, pass_reward: float) -> Outcomes:
        """See ``History``."""
        return self._cached_outcomes(self._known_at(step), pass_reward)

    def _known_at(self, step: int) -> int:
        """The newest round that counted when batch ``step`` was selected."""
        if step >= self._first:
            return min(self._policy_round, self._round - 1)
        number = self._round - 1
        while number > 1 and batches_before(self._project, number) > step:
            number -= 1
        return min(_explored_with(self._project.store, number), number - 1)

    def _read_outcomes(self, newest: int, pass_reward: float) -> Outcomes:
        from rft_platform.experience.queries import task_outcomes  # DuckDB is slow to import

        rounds = [number for number in self._project.store.rounds() if 1 <= number <= newest]
        found = task_outcomes(self._project.store, rounds, pass_reward)
        return Outcomes.of([task.task_id for task in self._project.tasks.tasks], found)


def _explored_with(store: ExperienceStore, round_number: int) -> int:
    """The round of the policy that a round explored with."""
    snapshot = store.read_note(round_number, SNAPSHOT)
    return round_number - 1 if snapshot is None else int(snapshot["round"])


class SignalCount:
    """Counts the groups of a round that the experience pipeline would train on, one task batch after the other.

    The configured judge judges these groups for the count only; the judgement for training is made in the judge stage.
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
        """Start another explore batch: its number of tasks is added to the number of wanted groups."""
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
