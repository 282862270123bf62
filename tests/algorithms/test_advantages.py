"""Advantages against their definitions, and the numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.algorithms.advantages.registry import ADVANTAGES, compute_advantages
from rft_platform.errors import UserError

HALF = 0.5 / (np.sqrt(0.5) + 1e-6)  # rewards 1 and 0: mean 0.5, sample standard deviation 0.70711


def two_runs(**args: object) -> np.ndarray:
    """Two runs of one task, outcomes 1 and 0, of 3 and 2 steps; rewards of earlier steps must not matter."""
    return compute_advantages(
        "step_wise_grpo",
        [9.0, 9.0, 1.0, 7.0, 0.0],
        ["task"] * 5,
        ["a", "a", "a", "b", "b"],
        [0, 1, 2, 0, 1],
        **args,
    )


def test_step_wise_broadcasts_the_outcome_of_each_run() -> None:
    np.testing.assert_allclose(two_runs(), [HALF] * 3 + [-HALF] * 2, rtol=1e-12)


def test_step_norm_divides_by_the_number_of_steps() -> None:
    np.testing.assert_allclose(two_runs(step_norm=True), [HALF / 3] * 3 + [-HALF / 2] * 2, rtol=1e-12)


def test_std_threshold_silences_the_group_at_or_below_it() -> None:
    assert (two_runs(std_threshold=np.sqrt(0.5)) == 0).all()
    assert (two_runs(std_threshold=0.7) != 0).all()


def test_last_step_is_found_whatever_the_order_of_rows() -> None:
    shuffled = compute_advantages("step_wise_grpo", [0.0, 1.0, 9.0], ["t"] * 3, ["b", "a", "a"], [0, 1, 0])
    np.testing.assert_allclose(shuffled, [-HALF, HALF, HALF], rtol=1e-12)


def test_grpo_by_hand() -> None:
    got = compute_advantages("grpo", [1.0, 0.0, 2.0, 5.0], ["x", "x", "y", "y"], ["1", "2", "3", "4"], [0] * 4)
    np.testing.assert_allclose(got[:2], [HALF, -HALF], rtol=1e-12)
    np.testing.assert_allclose(got[2:], [-1.5 / (np.sqrt(4.5) + 1e-6), 1.5 / (np.sqrt(4.5) + 1e-6)], rtol=1e-12)


def test_without_std_rewards_are_only_centred() -> None:
    got = compute_advantages("grpo", [1.0, 0.0, 0.0], ["x"] * 3, ["1", "2", "3"], [0] * 3, normalize_std=False)
    np.testing.assert_allclose(got, [2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("name", ADVANTAGES.names())
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.3])
def test_equal_rewards_give_exactly_zero(name: str, reward: float) -> None:
    got = compute_advantages(name, [reward] * 7, ["x"] * 3 + ["y"] * 3 + ["alone"], list("abcdefg"), [0] * 7)
    assert got.dtype == np.float64
    assert (got == 0).all()


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from([0.0, 0.5, 1.0, -2.0])), min_size=1, max_size=30))
def test_grpo_agrees_with_the_definition_group_by_group(rows: list[tuple[str, float]]) -> None:
    groups, rewards = np.array([g for g, _ in rows]), np.array([r for _, r in rows])
    got = compute_advantages("grpo", rewards, groups, [str(i) for i in range(len(rows))], [0] * len(rows))
    for group in np.unique(groups):
        mine = rewards[groups == group]
        spread = mine.std(ddof=1) if np.ptp(mine) else 0.0
        want = (mine - mine.mean()) / (spread + 1e-6) if spread else np.zeros(len(mine))
        np.testing.assert_allclose(got[groups == group], want, atol=1e-9)


@given(st.data())
def test_step_wise_is_grpo_over_outcomes(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))  # of each run
    outcomes = data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.25]), min_size=len(steps), max_size=len(steps)))
    groups = data.draw(st.lists(st.sampled_from("xy"), min_size=len(steps), max_size=len(steps)))
    rows = [(r, s) for r, n in enumerate(steps) for s in range(n)]
    order = data.draw(st.permutations(range(len(rows))))
    rows = [rows[i] for i in order]
    got = compute_advantages(
        "step_wise_grpo",
        [outcomes[r] if s == steps[r] - 1 else 0.0 for r, s in rows],
        [groups[r] for r, _ in rows],
        [f"run{r}" for r, _ in rows],
        [s for _, s in rows],
    )
    runs = [str(r) for r in range(len(steps))]
    want = compute_advantages("grpo", outcomes, groups, runs, [0] * len(steps))
    np.testing.assert_allclose(got, [want[r] for r, _ in rows], atol=1e-12)


def test_the_same_run_id_in_two_groups_is_two_runs() -> None:
    got = compute_advantages("step_wise_grpo", [1.0, 0.0, 0.0, 1.0], list("xxyy"), list("abab"), [0] * 4)
    np.testing.assert_allclose(got, [HALF, -HALF, -HALF, HALF], rtol=1e-12)


def test_no_rows_give_no_advantages() -> None:
    for name in ADVANTAGES.names():
        assert compute_advantages(name, [], [], [], []).shape == (0,)


def test_bad_names_options_and_rewards_are_user_errors() -> None:
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        compute_advantages("grpoo", [1.0], ["x"], ["a"], [0])
    with pytest.raises(UserError, match="did you mean 'normalize_std'"):
        compute_advantages("grpo", [1.0], ["x"], ["a"], [0], normalise_std=False)
    with pytest.raises(UserError, match="row 1 is nan"):
        compute_advantages("grpo", [1.0, float("nan")], ["x", "x"], ["a", "b"], [0, 0])
