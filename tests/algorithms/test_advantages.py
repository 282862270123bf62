"""Advantages against their definitions, and the numbers worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.algorithms.advantages.registry import ADVANTAGES, compute_advantages
from rft_platform.common.errors import UserError

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


@pytest.mark.parametrize("name", ["grpo", "step_wise_grpo", "gigpo"])
def test_without_eps_equal_rewards_give_exactly_zero(name: str) -> None:
    """One group has equal rewards; the other the literal formula, with a standard deviation of sqrt(1/2)."""
    rows = [("a", f"r{number}", 0, reward, "x") for number, reward in enumerate([0.1, 0.1])]
    rows += [("b", f"s{number}", 0, reward, "y") for number, reward in enumerate([0.0, 1.0])]
    states = {"env_state_hash": [row[4] for row in rows]}
    groups, runs, steps, rewards, _ = zip(*rows, strict=True)

    def compute_with(**args: Any) -> list[float]:
        options = {"normalize_std": True, "omega": 0.0} if name == "gigpo" else {}
        columns = states if name == "gigpo" else None
        return compute_advantages(name, rewards, groups, runs, steps, columns=columns, **options, **args).tolist()

    assert compute_with(eps=0) == pytest.approx([0, 0, -(0.5**0.5), 0.5**0.5])
    assert compute_with(eps=0)[:2] == [0, 0]
    with pytest.raises(UserError, match=r"argument 'eps' of advantage function .* is -0\.5: input should be greater"):
        compute_with(eps=-0.5)


def test_equal_rewards_of_a_whole_round_give_zero_without_eps() -> None:
    got = compute_advantages("grpo", [1, 1, 1], ["a", "a", "b"], ["1", "2", "3"], [0, 0, 0], std_level="batch", eps=0)
    assert got.tolist() == [0, 0, 0]


def test_step_norm_divides_by_the_number_of_steps() -> None:
    np.testing.assert_allclose(two_runs(step_norm=True), [HALF / 3] * 3 + [-HALF / 2] * 2, rtol=1e-12)


def test_step_norm_counts_the_choices_of_one_call_as_one_step() -> None:
    got = compute_advantages(
        "step_wise_grpo", [0.0, 0.0, 1.0, 0.0], ["t"] * 4, ["a", "a", "a", "b"], [0, 0, 1, 0], step_norm=True
    )
    np.testing.assert_allclose(got, [HALF / 2] * 3 + [-HALF], rtol=1e-12)


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


def rows_of(name: str, count: int) -> dict[str, Any]:
    """What an advantage needs besides rewards: every row in its own state, the first row from a greedy run."""
    columns = {"env_state_hash": [str(i) for i in range(count)], "temperature": [float(i > 0) for i in range(count)]}
    read = {*ADVANTAGES.get(name).needs, *ADVANTAGES.get(name).reads}
    return {"columns": {column: values for column, values in columns.items() if column in read}}


@pytest.mark.parametrize("name", ADVANTAGES.names())
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.3])
def test_equal_rewards_give_exactly_zero(name: str, reward: float) -> None:
    got = compute_advantages(name, [reward] * 6, ["x"] * 3 + ["y"] * 3, list("abcdef"), [0] * 6, **rows_of(name, 6))
    assert got.dtype == np.float64
    assert (got == (0.1 if name == "asymre" else 0.0)).all()  # asymre imitates where no run is better
    alone = compute_advantages(name, [reward], ["x"], ["a"], [0], **rows_of(name, 1))
    assert alone == (reward if name in ("opmd", "asymre") else 0.0)  # they have baseline 0 in a group of one


@pytest.mark.parametrize("tau", [1e-3, 0.5, 20.0])
@pytest.mark.parametrize("reward", [0.1, -3.3, 1e4])
def test_equal_rewards_give_exactly_zero_with_logavgexp_too(reward: float, tau: float) -> None:
    got = compute_advantages("opmd", [reward] * 3, ["x"] * 3, list("abc"), [0] * 3, baseline="logavgexp", tau=tau)
    assert (got == 0).all()


def random_runs(seed: int) -> list[tuple[str, str, int, float, str | None]]:
    """Rows of 12 runs of 3 tasks, in any order: task, run, step, reward (the outcome on every row), state."""
    rng = np.random.default_rng(seed)
    rows = []
    for run in range(12):
        outcome = float(rng.choice([0.0, 1.0, 0.3, -2.0]))
        for step in range(rng.integers(1, 5)):
            state = None if rng.random() < 0.2 else f"state{rng.integers(0, 3)}"
            rows.append((f"task{run % 3}", f"run{run}", step, outcome, state))
    return [rows[i] for i in rng.permutation(len(rows))]


def compute(name: str, rows: list[tuple[str, str, int, float, str | None]], **args: Any) -> np.ndarray:
    groups, runs, steps, rewards, states = zip(*rows, strict=True)
    return compute_advantages(name, rewards, groups, runs, steps, columns={"env_state_hash": states}, **args)


def outcomes(rows: list[tuple[str, str, int, float, str | None]], group: str) -> dict[str, float]:
    return {run: reward for task, run, _, reward, _ in rows if task == group}


@pytest.mark.parametrize("seed", range(5))
def test_rloo_leaves_one_out(seed: int) -> None:
    rows = random_runs(seed)
    want = []
    for task, run, _, reward, _ in rows:
        others = [value for other, value in outcomes(rows, task).items() if other != run]
        want.append(reward - sum(others) / len(others))
    np.testing.assert_allclose(compute("rloo", rows), want, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_remax_subtracts_the_outcome_of_the_greedy_run(seed: int) -> None:
    rows = random_runs(seed)
    greedy = {"run3", "run7"}  # of task0 and task1; task2 lost its greedy run
    groups, runs, steps, rewards, _ = zip(*rows, strict=True)
    columns: Any = {"temperature": [0.0 if run in greedy else 0.7 for run in runs]}
    got = compute_advantages("remax", rewards, groups, runs, steps, columns=columns)
    for value, (task, run, _, reward, _) in zip(got, rows, strict=True):
        baseline = {"task0": outcomes(rows, "task0")["run3"], "task1": outcomes(rows, "task1")["run7"]}.get(task)
        assert value == (0.0 if baseline is None or run in greedy else reward - baseline)


def test_remax_needs_a_run_whose_calls_are_all_greedy() -> None:
    for of_first_run in ([0.0, 1.0], [1.0, 0.0]):  # a greedy and a sampled call
        columns: Any = {"temperature": [*of_first_run, 1.0]}
        with pytest.raises(UserError, match="no run was decoded greedily"):
            compute_advantages("remax", [1.0, 1.0, 0.0], ["x"] * 3, ["a", "a", "b"], [0, 1, 0], columns=columns)
    with pytest.raises(UserError, match="no run was decoded greedily"):
        compute_advantages("remax", [1.0, 0.0], ["x"] * 2, ["a", "b"], [0, 0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tau", [0.1, 1.0, 5.0])
def test_opmd_subtracts_its_baseline(seed: int, tau: float) -> None:
    rows = [*random_runs(seed), ("alone", "run99", 0, 0.7, None)]
    mean, soft = [], []
    for task, _, _, reward, _ in rows:
        values = list(outcomes(rows, task).values())
        single = len(values) == 1
        mean.append(reward - (0.0 if single else math.fsum(values) / len(values)))
        average = math.fsum(math.exp(value / tau) for value in values) / len(values)
        soft.append(reward - (0.0 if single else tau * math.log(average)))
    np.testing.assert_allclose(compute("opmd", rows), mean, atol=1e-12)
    np.testing.assert_allclose(compute("opmd", rows, baseline="logavgexp", tau=tau), soft, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_asymre_subtracts_less_than_the_mean(seed: int) -> None:
    rows = [*random_runs(seed), ("alone", "run99", 0, 0.7, None)]
    want = []
    for task, _, _, reward, _ in rows:
        values = list(outcomes(rows, task).values())
        want.append(reward - (0.0 if len(values) == 1 else math.fsum(values) / len(values) - 0.25))
    np.testing.assert_allclose(compute("asymre", rows, baseline_shift=-0.25), want, atol=1e-12)
    with pytest.raises(UserError, match=r"'baseline_shift' .* is 0\.1: input should be less than or equal to 0"):
        compute("asymre", rows, baseline_shift=0.1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["grpo", "step_wise_grpo"])
def test_the_standard_deviation_of_the_whole_batch(seed: int, name: str) -> None:
    rows = random_runs(seed)
    if name == "grpo":  # every row counts
        rows = [(task, f"{run}.{step}", 0, reward, None) for task, run, step, reward, _ in rows]
    of_run = {run: (task, reward) for task, run, _, reward, _ in rows}
    every = [reward for _, reward in of_run.values()]
    mean = math.fsum(every) / len(every)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in every) / (len(every) - 1))
    want = []
    for task, run, _, _, _ in rows:
        group = [reward for other, reward in of_run.values() if other == task]
        want.append((of_run[run][1] - math.fsum(group) / len(group)) / (std + 0.01))
    np.testing.assert_allclose(compute(name, rows, std_level="batch", eps=0.01), want, atol=1e-12)
    equal = [(*row[:3], 0.1, None) for row in rows]
    assert (compute(name, equal, std_level="batch") == 0).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("normalize_std", [False, True])
def test_gigpo_compares_runs_and_steps_in_equal_states(seed: int, normalize_std: bool) -> None:
    rows = random_runs(seed)
    length: dict[str, int] = {}
    for _, run, step, _, _ in rows:
        length[run] = max(length.get(run, 0), step + 1)

    def relative(value: float, values: list[float]) -> float:
        if len(values) < 2 or max(values) == min(values):
            return 0.0
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
        return (value - mean) / (spread + 1e-6 if normalize_std else 1.0)

    def to_go(row: tuple[str, str, int, float, str | None]) -> float:
        return 0.9 ** (length[row[1]] - 1 - row[2]) * row[3]

    want = []
    for row in rows:
        episode = relative(row[3], list(outcomes(rows, row[0]).values()))
        peers = [to_go(other) for other in rows if other[0] == row[0] and other[4] == row[4]]
        want.append(episode + 0.5 * (0.0 if row[4] is None else relative(to_go(row), peers)))
    got = compute("gigpo", rows, omega=0.5, gamma=0.9, normalize_std=normalize_std)
    np.testing.assert_allclose(got, want, atol=1e-9)


def test_gigpo_by_hand() -> None:
    rows = [
        ("t", "a", 0, 1.0, "start"),
        ("t", "a", 1, 1.0, "near"),
        ("t", "b", 0, 0.0, "start"),
        ("u", "c", 0, 9.0, "start"),
    ]
    # episodes: a +0.5, b -0.5; steps in "start": 0.5 * 1 and 0 -> +-0.25; "near" and task u have nobody to compare with
    np.testing.assert_allclose(compute("gigpo", rows, gamma=0.5), [0.75, 0.5, -0.75, 0.0])


def test_gigpo_takes_the_rewards_of_steps_where_they_were_given() -> None:
    rows = [
        ("t", "a", 0, 1.0, "start"),
        ("t", "a", 2, 1.0, "mid"),
        ("t", "a", 3, 1.0, "end"),
        ("t", "b", 0, 0.0, "start"),
        ("t", "b", 1, 0.0, "mid"),
    ]
    groups, runs, steps, rewards, states = zip(*rows, strict=True)
    columns = {"env_state_hash": states, "step_reward": [0.25, None, 0.5, 1.0, None]}
    got = compute_advantages("gigpo", rewards, groups, runs, steps, columns=columns, gamma=0.5)
    # a: 0.25, nothing, and 0.5 with what is left of its outcome, 0.25; b: 1, and -1 at its end: its outcome is 0
    a_end, b_end = 0.75, -1.0
    a_mid, a_start, b_start = 0.5 * a_end, 0.25 + 0.25 * 0.5 * a_end, 1.0 + 0.5 * b_end
    start, mid = (a_start + b_start) / 2, (a_mid + b_end) / 2
    want = [0.5 + a_start - start, 0.5 + a_mid - mid, 0.5, -0.5 + b_start - start, -0.5 + b_end - mid]
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_the_error_of_gigpo_without_states_names_how_to_set_them() -> None:
    with pytest.raises(UserError, match=r"model\.set_env_state"):
        compute_advantages("gigpo", [1.0, 0.0], ["x", "x"], ["a", "b"], [0, 0])
    with pytest.raises(UserError, match=r"'gamma' .* is 1\.5: .* less than or equal to 1"):
        compute("gigpo", random_runs(0), gamma=1.5)


def test_opmd_refuses_options_out_of_range() -> None:
    with pytest.raises(UserError, match=r"'baseline' .* is 'median'"):
        compute("opmd", random_runs(0), baseline="median")
    with pytest.raises(UserError, match=r"'tau' .* is 0"):
        compute("opmd", random_runs(0), tau=0)


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
