"""Which rows make which step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.training.loop.plan import group_steps, stream_steps
from rft_platform.training.loop.training_run import share_of_rank

GROUPS = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def groups_of(sizes: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


def test_equal_groups_fill_the_batch_exactly() -> None:
    group = groups_of([8] * 256)
    steps = list(group_steps(group, 512, seed=1, epochs=1))
    assert [len(step) for step in steps] == [512] * 4
    assert not np.array_equal(np.concatenate(steps), np.arange(2048))  # shuffled


def test_a_remainder_is_spread_over_the_steps() -> None:
    steps = list(group_steps(groups_of([8] * 65), 256, seed=1, epochs=1))
    assert sorted(len(step) for step in steps) == [168, 176, 176]


@given(GROUPS, st.integers(1, 40), st.integers(0, 5))
def test_every_row_once_a_pass_and_groups_whole(sizes: list[int], batch_size: int, seed: int) -> None:
    group = groups_of(sizes)
    steps = list(group_steps(group, batch_size, seed, epochs=2))
    half = len(group)
    rows = np.concatenate(steps)
    assert sorted(rows[:half]) == sorted(rows[half:]) == list(range(half))
    ends = np.cumsum([len(step) for step in steps])
    one_pass = steps[: int(np.searchsorted(ends, half)) + 1]
    assert len(one_pass) <= -(-half // batch_size)
    homes = [set(group[step]) for step in one_pass]
    assert sum(map(len, homes)) == len(sizes)  # no group is in two steps


def test_same_seed_same_order() -> None:
    group = groups_of([3, 1, 4, 1, 5])
    first, again, other = (np.concatenate(list(group_steps(group, 4, seed, 3))) for seed in (5, 5, 6))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_no_rows_no_steps() -> None:
    assert list(group_steps(np.empty(0, np.int64), 4, 0, 1)) == []


def test_a_stream_continues_at_its_position() -> None:
    group = groups_of([1, 2, 1, 3, 1, 1, 2])
    whole = list(stream_steps(group, 3, seed=2, position=0, count=21))
    parts = [*stream_steps(group, 3, 2, 0, 6), *stream_steps(group, 3, 2, 6, 15)]
    assert [step.tolist() for step in parts] == [step.tolist() for step in whole]
    assert sorted(np.concatenate(whole)) == sorted(list(range(11)) * 3)  # three passes of 7 conversations


def test_the_last_step_of_a_stream_may_be_short() -> None:
    assert [len(step) for step in stream_steps(groups_of([1] * 10), 4, 0, 0, 10)] == [4, 4, 2]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_a_step_by_groups_and_tokens(world_size: int) -> None:
    group = groups_of([4] * 12)
    tokens = np.random.default_rng(0).integers(5, 50, len(group))
    rows = np.arange(8, 48)
    shares = [share_of_rank(rows, group, tokens[rows], rank, world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(shares)) == rows.tolist()
    owners = [set(group[share]) for share in shares]
    assert sum(map(len, owners)) == 10
    loads = [tokens[share].sum() for share in shares]
    assert max(loads) - min(loads) <= tokens.max() * 4
