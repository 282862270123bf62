"""Task selectors: functions that choose the tasks of an explore batch from seed, step and earlier outcomes.

A selector is deterministic: a repeated round takes the same tasks. ``sequential`` and ``shuffle`` use every task once
per epoch (a batch at the end of an epoch continues with the next epoch), ``random`` draws every batch independently,
``easy_to_hard`` is a curriculum within each epoch.

``difficulty_based`` selects the tasks with the most useful difficulty, by a Beta posterior over the pass rate of every
task. Runs of a task pass with an unknown rate p. With prior Beta(a, b), s passes and f failures the posterior is
Beta(a + s, b + f). The variance of a group's rewards, p (1 - p), and with it the gradient, is largest at p = 1/2.

``Mixture`` distributes an endless stream of tasks over several tasksets in proportion to their weights, in the order of
Sainte-Laguë's method: entry ``i`` takes its ``n``-th task (from 0) at ``(n + 1/2) / weight_i``. After any number of
tasks, the share of each entry is as near to its weight as whole tasks allow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isnan, lcm
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field

from rft_platform.algorithms.common.registry import Registry, Share, check_arguments
from rft_platform.common.errors import UserError
from rft_platform.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One entry per task and round in which the task was run; tasks that no longer exist are omitted."""

    task_N: np.ndarray  # int64: index of the task
    round_N: np.ndarray  # int64
    runs_N: np.ndarray  # float64
    passes_N: np.ndarray  # float64

    @classmethod
    def of(cls, task_ids: Sequence[str], found: Sequence[tuple[str, int, float, float]]) -> "Outcomes":
        """Build from tuples ``(task_id, round, runs, passes)``."""
        index = {task_id: number for number, task_id in enumerate(task_ids)}
        known = [(index[task], *rest) for task, *rest in found if task in index]
        columns = np.array(known, np.float64).reshape(-1, 4).T
        return cls(columns[0].astype(np.int64), columns[1].astype(np.int64), columns[2], columns[3])

    def totals(self, tasks: int, decay: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """float64 [tasks] each: passes and failures. A round has the weight ``decay ** (newest round - round)``."""
        weight_N = decay ** (self.round_N.max(initial=0) - self.round_N).astype(np.float64)
        passes_T = np.bincount(self.task_N, weights=weight_N * self.passes_N, minlength=tasks)
        runs_T = np.bincount(self.task_N, weights=weight_N * self.runs_N, minlength=tasks)
        return passes_T, runs_T - passes_T


class History(Protocol):
    """Source of the tasks' outcomes for selectors."""

    def outcomes(self, step: int, pass_reward: float) -> Outcomes:
        """The outcomes known when batch ``step`` of tasks was chosen; a run passes at ``pass_reward``.

        Later outcomes do not count, so repeated calls give the same result.
        """
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """The tasks to choose from a taskset, and everything else that the choice may depend on.

    ``step`` counts batches of tasks. With several tasksets, a batch has tasks of each.
    """

    count: int  # tasks to choose
    first: int  # tasks of the taskset that the project took before
    round_first: int  # tasks of the taskset that the round took before
    step: int  # batches that the project took before
    round: int
    seed: int
    feature_keys: Sequence[str] = ()  # columns of the tasks with their difficulty
    step_of: Callable[[int], int] = field(default=lambda position: 0)  # the step that took a position of the taskset


@dataclass(frozen=True, slots=True)
class Chosen:
    """Indices of the chosen tasks, in order, and statistics for the report."""

    indices: list[int]
    statistics: Mapping[str, float] = field(default_factory=dict)


SelectorFunction = Callable[..., Chosen]
"""``(tasks: Sequence[Task], moment: Moment, history: History, *, options) -> Chosen``."""

SELECTORS: Registry[SelectorFunction] = Registry("task selector", "rft_platform.tasks.selectors")


def selector(name: str) -> Callable[[SelectorFunction], SelectorFunction]:
    """Register the decorated function under ``name`` (``task_selector.selector_type`` of a taskset)."""

    def decorate(function: SelectorFunction) -> SelectorFunction:
        SELECTORS.add(name, function, function)
        return function

    return decorate


def find_selector(name: str, args: Mapping[str, Any]) -> SelectorFunction:
    """The selector called ``name``; UserError for an unknown name or unsuitable options."""
    function = SELECTORS.get(name)
    check_arguments(f"task selector {name!r}", function, args)
    return function


def select(
    name: str, tasks: Sequence[Task], moment: Moment, history: History, args: Mapping[str, Any] | None = None
) -> Chosen:
    """The tasks of one batch. Raises ValueError if nothing can be chosen, and UserError as ``find_selector``."""
    if not tasks or moment.count < 1 or moment.first < 0:
        raise ValueError(
            f"select: {len(tasks)} tasks, count {moment.count}, first {moment.first}: nothing can be selected"
        )
    return find_selector(name, args or {})(tasks, moment, history, **(args or {}))


@selector("sequential")
def sequential(tasks: Sequence[Task], moment: Moment, history: History) -> Chosen:
    """Select tasks in the order of the dataset."""
    return in_epochs(len(tasks), moment, lambda epoch: range(len(tasks)))


@selector("shuffle")
def shuffle(tasks: Sequence[Task], moment: Moment, history: History) -> Chosen:
    """Select tasks in a new random order in each epoch."""

    def permuted(epoch: int) -> Sequence[int]:
        order: list[int] = np.random.default_rng([moment.seed, epoch]).permutation(len(tasks)).tolist()
        return order

    return in_epochs(len(tasks), moment, permuted)


def in_epochs(count: int, moment: Moment, order_of: Callable[[int], Sequence[int]]) -> Chosen:
    """The batch of ``moment`` in a stream of epochs; ``order_of(epoch)`` is a permutation of ``count`` indices."""
    positions = range(moment.first, moment.first + moment.count)
    orders = {epoch: order_of(epoch) for epoch in sorted({position // count for position in positions})}
    return Chosen([orders[position // count][position % count] for position in positions])


@selector("random")
def random(tasks: Sequence[Task], moment: Moment, history: History) -> Chosen:
    """Draw tasks without replacement within a batch, as long as there are enough tasks."""
    generator = np.random.default_rng([moment.seed, moment.step])
    whole, rest = divmod(moment.count, len(tasks))
    rounds = [generator.permutation(len(tasks)) for _ in range(whole)]
    drawn = np.concatenate([*rounds, generator.choice(len(tasks), rest, replace=False)])
    return Chosen(drawn.astype(int).tolist())


@selector("easy_to_hard")
def easy_to_hard(
    tasks: Sequence[Task], moment: Moment, history: History, *, descending: bool = False, pass_reward: float = 1.0
) -> Chosen:
    """Sort by the columns ``feature_keys``; the smallest value (with ``descending`` the largest) is the easiest.

    Without columns, sort by the pass rate measured before the epoch began (a run passes if its reward reaches
    ``pass_reward``); a task without runs has the pass rate 1/2. Ties keep the order of the dataset.
    """
    if moment.feature_keys:
        by_column = _by_columns(tasks, moment.feature_keys, descending)
        return in_epochs(len(tasks), moment, lambda epoch: by_column)
    if descending:
        raise UserError("task selector 'easy_to_hard': descending needs feature_keys, and none is set")

    def measured(epoch: int) -> Sequence[int]:
        begin = moment.step_of(epoch * len(tasks))
        passes, failures = history.outcomes(begin, pass_reward).totals(len(tasks))
        order: list[int] = np.argsort(-(passes + 1) / (passes + failures + 2), kind="stable").tolist()
        return order

    return in_epochs(len(tasks), moment, measured)


def _by_columns(tasks: Sequence[Task], keys: Sequence[str], descending: bool) -> list[int]:
    missing = [key for key in keys if any(_is_missing(task.raw.get(key)) for task in tasks)]
    if missing:
        columns = ", ".join(tasks[0].raw)
        raise UserError(
            f"task_selector.feature_keys: not every task has a value of {', '.join(missing)}; the columns are {columns}"
        )
    try:
        return sorted(range(len(tasks)), key=lambda index: [tasks[index].raw[key] for key in keys], reverse=descending)
    except TypeError as error:
        raise UserError(f"task_selector.feature_keys {list(keys)}: values cannot be put in order ({error})") from None


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and isnan(value))  # NaN cannot be put in order


Positive = Annotated[float, Field(gt=0)]


@selector("difficulty_based")
def difficulty_based(
    tasks: Sequence[Task],
    moment: Moment,
    history: History,
    *,
    target: Share = 0.5,
    how: Literal["thompson", "probability"] = "thompson",
    width: Annotated[float, Field(gt=0, le=1)] = 0.2,
    prior_alpha: Positive = 1.0,
    prior_beta: Positive = 1.0,
    prior_runs: Positive = 2.0,
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0,
    pass_reward: float = 1.0,
) -> Chosen:
    """The tasks whose pass rate is most probably near ``target``. A round repeats a task only if it has too few tasks.

    ``how: thompson`` ranks by the distance between ``target`` and one draw from each posterior, so that tasks with few
    runs are explored. ``probability`` ranks by the posterior probability of a rate within ``width`` of the target. Only
    outcomes up to the round that trained the exploring policy count; older rounds are weighted by ``decay`` per round,
    because the policy has changed since. The first of ``feature_keys``, if any, is a column with an expected pass rate,
    which counts as ``prior_runs`` runs. Ties are broken at random by seed and round.
    """
    passes_T, failures_T = history.outcomes(moment.step, pass_reward).totals(len(tasks), decay)
    expected_T, weight = _expected(tasks, moment.feature_keys), prior_runs if moment.feature_keys else 0.0
    alpha_T = prior_alpha + weight * expected_T + passes_T
    beta_T = prior_beta + weight * (1 - expected_T) + failures_T
    generator = np.random.default_rng([moment.seed, moment.round])
    tie_T = generator.permutation(len(tasks))
    near_T = near(alpha_T, beta_T, target, width)
    cost_T = np.abs(generator.beta(alpha_T, beta_T) - target) if how == "thompson" else -near_T
    ranked = np.lexsort((tie_T, cost_T))
    start = moment.round_first
    chosen = ranked[np.arange(start, start + moment.count) % len(tasks)]
    tried_T = passes_T + failures_T > 0
    return Chosen(
        chosen.tolist(),
        {
            "tried_tasks": float(tried_T.sum()),
            "selected_tried": float(tried_T[chosen].sum()),
            "selected_pass_rate": float((alpha_T / (alpha_T + beta_T))[chosen].mean()),
            "selected_near_target": float(near_T[chosen].mean()),
        },
    )


def near(alpha: np.ndarray, beta: np.ndarray, target: float, width: float) -> np.ndarray:
    """Probability that a Beta(alpha, beta) variable is within ``width`` of ``target``, rounded to 12 digits."""
    from scipy.special import betainc  # type: ignore[import-untyped]

    high, low = betainc(alpha, beta, min(target + width, 1.0)), betainc(alpha, beta, max(target - width, 0.0))
    return np.round(high - low, 12)  # equal posteriors tie, regardless of rounding errors


def _expected(tasks: Sequence[Task], feature_keys: Sequence[str]) -> np.ndarray:
    if not feature_keys:
        return np.zeros(len(tasks))
    values = [task.raw.get(feature_keys[0]) for task in tasks]
    try:
        rates = np.array(values, np.float64)
    except (TypeError, ValueError):
        rates = np.full(len(tasks), np.nan)
    if not ((rates >= 0) & (rates <= 1)).all():
        raise UserError(
            f"task_selector.feature_keys: column {feature_keys[0]!r} must hold an expected pass rate from 0 to 1 of "
            "every task; leave it out, or use selector_type: easy_to_hard"
        )
    return rates


@dataclass(frozen=True, slots=True)
class Mixture:
    """Assigns each position of the stream to an entry. The assignment depends only on the weights."""

    weights: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float]) -> "Mixture":
        """The mixture of entries with these positive weights. Decimal fractions are represented exactly."""
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        return cls(tuple(int(weight * scale) for weight in exact))

    def position(self, entry: int, number: int) -> int:
        """The position of the ``number``-th task (from 0) of ``entry`` in the stream."""
        own = self.weights[entry]
        before = 0
        for other, weight in enumerate(self.weights):
            if other == entry:
                before += number
                continue
            # The tasks m of the other entry with (m + 1/2) / weight < (number + 1/2) / own; the first entry wins ties.
            whole, rest = divmod((2 * number + 1) * weight, own)
            odd_up_to = whole if rest or other < entry else whole - 1
            before += (odd_up_to + 1) // 2
        return before

    def taken(self, entry: int, positions: int) -> int:
        """Number of the first ``positions`` positions that ``entry`` takes."""
        number = positions * self.weights[entry] // sum(self.weights)
        while self.position(entry, number) < positions:
            number += 1
        while number and self.position(entry, number - 1) >= positions:
            number -= 1
        return number

    def entries(self, first: int, count: int) -> list[int]:
        """The entries that take ``count`` positions, starting with position ``first``."""
        found: dict[int, int] = {}
        for entry in range(len(self.weights)):
            number = self.taken(entry, first)
            while (place := self.position(entry, number)) < first + count:
                found[place] = entry
                number += 1
        return [found[place] for place in range(first, first + count)]
