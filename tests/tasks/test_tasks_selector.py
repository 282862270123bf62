"""Selecting batches: pure in the step, every task once an epoch."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.tasks.selector import Order, select
from rft_platform.tasks.task import Task

TASKS = [Task(str(i), "t", f"p{i}", None, {}) for i in range(7)]


def batch(step: int, size: int = 3, order: Order = "shuffle", seed: int = 0) -> list[str]:
    return [task.task_id for task in select(TASKS, size, step, order, seed)]


def test_sequential_goes_round() -> None:
    assert batch(0, order="sequential") == ["0", "1", "2"]
    assert batch(2, order="sequential") == ["6", "0", "1"]


@given(size=st.integers(1, 20), seed=st.integers(0, 2**32), epochs=st.integers(1, 3))
def test_shuffle_uses_every_task_once_an_epoch(size: int, seed: int, epochs: int) -> None:
    steps = -(-epochs * len(TASKS) // size)
    stream = list(chain.from_iterable(batch(step, size, "shuffle", seed) for step in range(steps)))
    for epoch in range(epochs):
        part = stream[epoch * len(TASKS) : (epoch + 1) * len(TASKS)]
        assert sorted(part) == sorted(task.task_id for task in TASKS)


def test_epochs_and_seeds_differ() -> None:
    first, second = batch(0, 7), batch(1, 7)
    assert first != second
    assert first != batch(0, 7, seed=1)
    assert first == batch(0, 7)


@given(size=st.integers(1, 30), step=st.integers(0, 1000))
def test_random_draws_evenly_inside_a_batch(size: int, step: int) -> None:
    counts = Counter(batch(step, size, "random"))
    assert sum(counts.values()) == size
    assert max(counts.values()) <= -(-size // len(TASKS))


def test_random_differs_from_step_to_step() -> None:
    assert len({tuple(batch(step, 4, "random")) for step in range(20)}) > 10


def test_nothing_to_select_from() -> None:
    with pytest.raises(ValueError, match="nothing can be selected"):
        select([], 1, 0, "shuffle", 0)
    with pytest.raises(ValueError, match="nothing can be selected"):
        select(TASKS, 0, 0, "shuffle", 0)
