"""Selecting batches of tasks: pure in seed, step and history; every task once an epoch; posteriors in closed form."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.common.errors import UserError
from rft_platform.tasks.selectors import SELECTORS, Chosen, Moment, Outcomes, near, select
from rft_platform.tasks.task import Task

LEVELS = [5, 2, 2, 9, 1, 7, 3]
TASKS = [Task(str(i), "t", f"p{i}", None, {"level": level, "rate": level / 10}) for i, level in enumerate(LEVELS)]
EPOCHS = ["sequential", "shuffle", "easy_to_hard"]


class Known:
    """A history of ``(task, round, runs, passes)``, and the step from which on each round counts."""

    def __init__(self, *found: tuple[str, int, float, float], first_step: int = 0) -> None:
        self.found, self.first_step = found, first_step

    def outcomes(self, step: int, pass_reward: float) -> Outcomes:
        return Outcomes.of([task.task_id for task in TASKS], self.found if step >= self.first_step else [])


def choose(
    name: str, step: int, size: int = 3, *, keys: Sequence[str] = (), known: Known | None = None, **at: Any
) -> Chosen:
    moment = Moment(
        count=size,
        first=step * size,
        round_first=at.pop("round_step", 0) * size,
        step=step,
        round=at.pop("round", step + 1),
        seed=at.pop("seed", 0),
        feature_keys=keys,
        step_of=lambda position: position // size,
    )
    return select(name, TASKS, moment, known or Known(), at)


def batch(name: str, step: int, size: int = 3, **at: Any) -> list[int]:
    return choose(name, step, size, **at).indices


def test_the_selectors_there_are() -> None:
    assert SELECTORS.names() == ["difficulty_based", "easy_to_hard", "random", "sequential", "shuffle"]


def test_sequential_wraps_around() -> None:
    assert batch("sequential", 0) == [0, 1, 2]
    assert batch("sequential", 2) == [6, 0, 1]


@given(
    name=st.sampled_from(EPOCHS), size=st.integers(1, 20), seed=st.integers(0, 2**32), epochs=st.integers(1, 3),
    keys=st.sampled_from([(), ("level",)]),
)  # fmt: skip
def test_every_task_once_an_epoch(name: str, size: int, seed: int, epochs: int, keys: tuple[str, ...]) -> None:
    steps = -(-epochs * len(TASKS) // size)
    known = Known(("3", 1, 4, 4), ("0", 2, 4, 1), first_step=1)
    stream = list(
        chain.from_iterable(batch(name, step, size, seed=seed, keys=keys, known=known) for step in range(steps))
    )
    for epoch in range(epochs):
        part = stream[epoch * len(TASKS) : (epoch + 1) * len(TASKS)]
        assert sorted(part) == list(range(len(TASKS)))


def test_epochs_and_seeds_differ() -> None:
    first, second = batch("shuffle", 0, 7), batch("shuffle", 1, 7)
    assert first != second
    assert first != batch("shuffle", 0, 7, seed=1)
    assert first == batch("shuffle", 0, 7)


@given(size=st.integers(1, 30), step=st.integers(0, 1000))
def test_random_draws_evenly_inside_a_batch(size: int, step: int) -> None:
    counts = Counter(batch("random", step, size))
    assert sum(counts.values()) == size
    assert max(counts.values()) <= -(-size // len(TASKS))


def test_random_differs_from_step_to_step() -> None:
    assert len({tuple(batch("random", step, 4)) for step in range(20)}) > 10


def test_nothing_to_select_from() -> None:
    with pytest.raises(ValueError, match="nothing can be selected"):
        select("shuffle", [], Moment(1, 0, 0, 0, 1, 0), Known())
    with pytest.raises(ValueError, match="nothing can be selected"):
        select("shuffle", TASKS, Moment(0, 0, 0, 0, 1, 0), Known())


def test_easy_to_hard_follows_columns() -> None:
    assert batch("easy_to_hard", 0, 7, keys=["level"]) == [4, 1, 2, 6, 0, 5, 3]
    assert batch("easy_to_hard", 1, 7, keys=["level"], descending=True) == [3, 5, 0, 6, 1, 2, 4]
    with pytest.raises(UserError, match=r"not every task has a value of steps; the columns are level, rate"):
        batch("easy_to_hard", 0, keys=["steps"])
    unmeasured = [*TASKS, Task("7", "t", "p7", None, {"level": float("nan")})]
    with pytest.raises(UserError, match="not every task has a value of level"):
        select("easy_to_hard", unmeasured, Moment(3, 0, 0, 0, 1, 0, ["level"]), Known())
    with pytest.raises(UserError, match="descending needs feature_keys"):
        batch("easy_to_hard", 0, descending=True)


def test_easy_to_hard_follows_what_was_measured_before_the_epoch() -> None:
    """Batches of 3 over 7 tasks: the second epoch begins in batch 2, which the first round of outcomes precedes."""
    found = (("3", 1, 4, 4), ("0", 1, 4, 0), ("5", 1, 4, 3))
    first = Known(*found, first_step=2)
    assert [batch("easy_to_hard", step, known=first) for step in (0, 1)] == [[0, 1, 2], [3, 4, 5]]
    assert batch("easy_to_hard", 2, known=first) == [6, 3, 5]
    assert batch("easy_to_hard", 3, known=first) == [1, 2, 4]
    late = Known(*found, first_step=3)  # known only after the epoch has begun: the order stays
    assert batch("easy_to_hard", 3, known=late) == [2, 3, 4]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(0, 8), st.integers(0, 8)), max_size=12),
       st.floats(0.1, 1.0))  # fmt: skip
def test_totals_are_decayed_sums(found: list[tuple[int, int, int, int]], decay: float) -> None:
    entries = [(str(task), number, float(runs + passes), float(passes)) for task, number, runs, passes in found]
    passes, failures = Outcomes.of([task.task_id for task in TASKS], [*entries, ("gone", 1, 4.0, 1.0)]).totals(7, decay)
    newest = max((number for _, number, _, _ in entries), default=0)
    for task in range(7):
        own = [(decay ** (newest - number), runs, won) for name, number, runs, won in entries if name == str(task)]
        assert passes[task] == pytest.approx(sum(weight * won for weight, _, won in own))
        assert failures[task] == pytest.approx(sum(weight * (runs - won) for weight, runs, won in own))


@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 1), st.floats(0.01, 0.5))
def test_the_posterior_is_the_closed_form(alpha: int, beta: int, target: float, width: float) -> None:
    """Of whole parameters: P(Beta(a, b) <= x) = P(Binomial(a + b - 1, x) >= a)."""
    from math import comb

    def below(x: float) -> float:
        n = alpha + beta - 1
        return sum(comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(alpha, n + 1))

    want = below(min(1.0, target + width)) - below(max(0.0, target - width))
    assert near(np.array([alpha]), np.array([beta]), target, width)[0] == pytest.approx(want, abs=1e-9)


def test_tasks_near_the_target_come_first() -> None:
    found = [(str(task), 1, 16.0, float(passes)) for task, passes in enumerate([0, 16, 8, 7, 2, 14])]
    chosen = choose("difficulty_based", 1, 2, known=Known(*found), how="probability")
    assert chosen.indices == [2, 3]
    assert chosen.statistics == {
        "tried_tasks": 6.0,
        "selected_tried": 2.0,
        "selected_pass_rate": pytest.approx((9 / 18 + 8 / 18) / 2),
        "selected_near_target": pytest.approx(near(np.array([9, 8]), np.array([9, 10]), 0.5, 0.2).mean()),
    }
    assert batch("difficulty_based", 1, 2, known=Known(*found), target=0.9, how="probability") == [1, 5]
    assert batch("difficulty_based", 1, 1, known=Known(*found), round_step=2, how="probability") == [6], (
        "the task never run is next"
    )


def test_the_next_batches_of_a_round_take_the_next_tasks() -> None:
    known = Known(("3", 1, 8, 4))
    for how in ("probability", "thompson"):
        parts = [batch("difficulty_based", 4, 2, known=known, round=3, round_step=i, how=how) for i in range(4)]
        assert sorted(chain.from_iterable(parts))[:7] == sorted([*range(7), parts[3][1]])[:7]
        assert parts[0] == batch("difficulty_based", 4, 2, known=known, round=3, how=how)
        assert len(set(chain.from_iterable(parts[:3]))) == 6
        others = [tuple(batch("difficulty_based", 4, 2, known=known, round=n, how=how)) for n in range(1, 9)]
        assert len(set(others)) > 2, "equal ranks are settled anew each round"


def test_draws_follow_the_posteriors() -> None:
    """Task 2 passes half of the time, 0 never and 1 always: over many rounds the first is taken far more often."""
    found = [("0", 1, 12.0, 0.0), ("1", 1, 12.0, 12.0), ("2", 1, 12.0, 6.0)]
    taken = Counter(
        chain.from_iterable(batch("difficulty_based", 1, 1, known=Known(*found), round=n) for n in range(300))
    )
    assert taken[0] + taken[1] < 12
    assert 0.15 < taken[2] / 300 < 0.75, "and tasks that were never run have their share"
    assert all(taken[task] > 10 for task in range(2, 7))


def test_older_outcomes_fade_and_a_column_is_a_prior() -> None:
    known = Known(("0", 1, 8, 0), ("0", 9, 8, 4), ("1", 9, 8, 4))
    sure = choose("difficulty_based", 1, 1, known=known, decay=1.0, how="probability").indices
    assert sure == [1]
    merits = [
        choose("difficulty_based", 1, 7, known=known, decay=d).statistics["selected_near_target"] for d in (1.0, 0.5)
    ]
    assert merits[1] > merits[0], "what failed long ago counts less"
    assert batch("difficulty_based", 0, 1, keys=["rate"], prior_runs=20.0, how="probability") == [0], "rate 0.5"
    with pytest.raises(UserError, match="column 'level' must hold an expected pass rate"):
        batch("difficulty_based", 0, keys=["level"])


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("difficulty", {}, "did you mean 'difficulty_based'?"),
        ("difficulty_based", {"traget": 0.5}, "did you mean 'target'?"),
        ("difficulty_based", {"target": 1.5}, "less than or equal to 1"),
        ("shuffle", {"target": 0.5}, "takes no argument"),
    ],
)
def test_options_that_do_not_fit_are_refused(name: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        choose(name, 0, **args)
