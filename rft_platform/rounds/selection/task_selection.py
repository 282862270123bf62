"""Select the tasks of a round, one batch after the other, and decide how many batches the round takes.

``TaskSelection`` uses the taskset's selector. ``SignalCount`` implements dynamic sampling: further task batches until
enough groups carry a signal (DAPO, arXiv 2503.14476).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserError
from rft_platform.experience.record import RolloutRow
from rft_platform.experience.store import ExperienceStore
from rft_platform.judging.execution.experience_pipeline import Pipeline, experiences_of
from rft_platform.judging.execution.judge_rollouts import judge_tasksets, usage_of
from rft_platform.judging.operators.filters import SURPLUS_GROUPS
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import TaskBatches, read
from rft_platform.rounds.setup.algorithm import pipeline_of
from rft_platform.rounds.setup.side_engines import auxiliaries_for_judges
from rft_platform.rounds.setup.taskset_binding import judges_of
from rft_platform.tasks.selectors import Mixture, Moment, Outcomes, find_selector, select
from rft_platform.tasks.task import Task

if TYPE_CHECKING:
    from rft_platform.tasks.dataset import TaskDataset

_SEED_OF_NEXT = 1_000_003  # distance of the seeds of two tasksets: equally large ones have different orders


class TaskSelection:
    """The task batches of one round. With several tasksets, a batch has tasks of each, in proportion to the weights.

    The batches depend on the seed, the earlier rounds, and the round of the exploring policy. A repeated round takes
    the same tasks, even if more has been stored since.
    """

    def __init__(self, project: Project, round_number: int, policy_round: int) -> None:
        self._project, self._round = project, round_number
        self._first = batches_before(project, round_number)
        self._mixture = mixture_of(project)
        self._history = {
            name: _StoredHistory(project, dataset, round_number, self._first, policy_round)
            for name, dataset in project.datasets.items()
        }
        self._taken: list[list[str]] = []
        self._statistics: list[dict[str, float]] = []

    def next(self) -> list[Task]:
        """The next batch of tasks."""
        size, step = self._project.batches.batch_size, self._first + len(self._taken)
        entries = self._mixture.entries(step * size, size)
        statistics: dict[str, float] = {}
        chosen = {
            entry: iter(self._choose(entry, name, entries.count(entry), statistics))
            for entry, name in enumerate(self._project.tasksets)
            if entry in entries
        }
        tasks = [next(chosen[entry]) for entry in entries]
        self._taken.append([task.task_id for task in tasks])
        self._statistics.append(statistics)
        return tasks

    def _choose(self, entry: int, name: str, count: int, statistics: dict[str, float]) -> list[Task]:
        """The next ``count`` tasks of a taskset; adds the selector's statistics to ``statistics``."""
        project, size = self._project, self._project.batches.batch_size
        tasks, chooser = project.datasets[name].tasks, project.tasksets[name].task_selector
        first = self._mixture.taken(entry, (self._first + len(self._taken)) * size)
        seed = project.config.seed if chooser.seed is None else chooser.seed
        moment = Moment(
            count=count,
            first=first,
            round_first=first - self._mixture.taken(entry, self._first * size),
            step=self._first + len(self._taken),
            round=self._round,
            seed=seed + entry * _SEED_OF_NEXT,
            feature_keys=tuple(chooser.feature_keys),
            step_of=lambda position: self._mixture.position(entry, position) // size,
        )
        chosen = select(chooser.selector_type, tasks, moment, self._history[name], chooser.args)
        suffix = "" if len(project.tasksets) == 1 else f"/{name}"
        statistics.update({f"{key}{suffix}": value for key, value in chosen.statistics.items()})
        return [tasks[index] for index in chosen.indices]

    def taken(self) -> TaskBatches:
        """The batches that ``next`` has returned, for the round's record."""
        names = dict.fromkeys(name for found in self._statistics for name in found)
        values = {name: [found[name] for found in self._statistics if name in found] for name in names}
        selectors = [taskset.task_selector.selector_type for taskset in self._project.tasksets.values()]
        return TaskBatches(
            selector=", ".join(dict.fromkeys(selectors)),
            first_batch=self._first,
            batches=len(self._taken),
            statistics={name: sum(found) / len(found) for name, found in values.items()},
            tasks=self._taken,
            tasksets={name: self._progress(entry, name) for entry, name in enumerate(self._project.tasksets)},
        )

    def _progress(self, entry: int, name: str) -> dict[str, float]:
        size = self._project.batches.batch_size
        before, after = (
            self._mixture.taken(entry, batches * size) for batches in (self._first, self._first + len(self._taken))
        )
        return {"tasks": after - before, "epochs": after / len(self._project.datasets[name].tasks)}


def mixture_of(project: Project) -> Mixture:
    """How the explored tasksets are mixed: by their weights, or by their numbers of tasks if no weights are set."""
    weights = [
        len(project.datasets[name].tasks) if taskset.weight is None else taskset.weight
        for name, taskset in project.tasksets.items()
    ]
    empty = [name for name, weight in zip(project.tasksets, weights, strict=True) if not weight]
    if empty:
        raise UserError(f"taskset {empty[0]!r} has no tasks: remove it from buffer.explorer_input, or add tasks")
    return Mixture.of(weights)


def batches_before(project: Project, round_number: int) -> int:
    """Number of task batches taken before a round; dynamic sampling may take several per round."""
    rounds = (read(project.store, number).explored for number in (round_number, round_number - 1))
    own, last = (None if explored is None else explored.task_selection for explored in rounds)
    if own is not None:  # this round was explored before: keep its number even if the previous round changed
        return own.first_batch
    if last is None:
        return (round_number - 1) * project.config.synchronizer.batches_a_round
    return last.first_batch + last.batches


def check_selector(project: Project) -> None:
    """Raise UserError if the selector does not exist, or if its options or columns do not fit the tasks."""
    for name, taskset in project.tasksets.items():
        chooser = taskset.task_selector
        find_selector(chooser.selector_type, chooser.args)
        keys = tuple(chooser.feature_keys)
        moment = Moment(count=1, first=0, round_first=0, step=0, round=1, seed=0, feature_keys=keys)
        select(chooser.selector_type, project.datasets[name].tasks, moment, _NoHistory(), chooser.args)


class _NoHistory:
    """The history before the first round."""

    def outcomes(self, step: int, pass_reward: float) -> Outcomes:
        """No outcomes."""
        return Outcomes.of([], [])


class _StoredHistory:
    """The stored outcomes of a taskset in the rounds up to the round of the policy that explored at a step."""

    def __init__(
        self, project: Project, dataset: "TaskDataset", round_number: int, first: int, policy_round: int
    ) -> None:
        self._dataset = dataset
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
        return Outcomes.of([task.task_id for task in self._dataset.tasks], found)


def _explored_with(store: ExperienceStore, round_number: int) -> int:
    """The round of the policy that a round explored with."""
    snapshot = read(store, round_number).snapshot()
    return round_number - 1 if snapshot is None else snapshot.round


class SignalCount:
    """Counts the groups of a round that the experience pipeline would train on, one task batch after the other.

    The configured judge judges these groups for the count only; the judgement for training is made in the judge stage.
    Without dynamic sampling nothing is judged, and one task batch is always enough.
    """

    def __init__(self, project: Project) -> None:
        whole = pipeline_of(project.settings)
        self.max_batches = project.batches.max_batches
        self._project = project
        self._judges = judges_of(project) if self.max_batches > 1 else {}
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
        needs_reward = self._project.settings.algorithm.needs_reward
        with auxiliaries_for_judges(self._project, self._judges) as auxiliaries:
            runs = judge_tasksets(
                rows, self._project.tasks.by_id(), self._judges, needs_reward=needs_reward, auxiliary_models=auxiliaries
            )
        sound = {run.run_id: run for run in runs if run.error is None}
        judged = [row for row in rows if row.run_id in sound]
        self._found += self._pipeline.apply(experiences_of(judged, list(sound.values()))).trained_groups
        return self._found >= self._wanted

    def as_dict(self) -> dict[str, Any]:
        """For the report: groups wanted, groups sampled, groups with signal; empty without dynamic sampling."""
        if self.max_batches == 1:
            return {}
        found = {"groups_wanted": self._wanted, "groups_sampled": self._sampled, "groups_with_signal": self._found}
        return {**found, "groups_surplus": max(0, self._found - self._wanted), **usage_of(self._judges)}
