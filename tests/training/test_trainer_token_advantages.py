"""Token advantages of rows that are split over ranks: every run whole, every token counted once."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from torch import Tensor

from rft_platform.algorithms.spec import AlgorithmSpec, CriticSpec, KlPenaltySpec
from rft_platform.common.errors import UserError
from rft_platform.training.data.rollout_rows import TrainingRows
from rft_platform.training.data.samples import Sample
from rft_platform.training.data.token_advantages import check_token_parts, set_token_advantages
from rft_platform.training.loop.plan import group_steps
from rft_platform.training.loop.training_run import share_of_rank

SPEC = AlgorithmSpec(
    token_advantage="gae",
    token_advantage_args={"gamma": 0.98, "lam": 0.9},
    critic=CriticSpec(),
    kl_penalty=KlPenaltySpec(coef=0.2, target=0.05, horizon=100),
)


def make_rows() -> TrainingRows:
    """Six tasks of three runs of one to three steps, shuffled; some rows have no trained token."""
    rng = np.random.default_rng(0)
    samples, group, run, step, reward = [], [], [], [], []
    for number in range(18):
        for place in range(1 + number % 3):
            n = int(rng.integers(3, 9))
            mask = (np.arange(n) > 0) & (rng.random(n) < 0.6) & (number != 4)
            columns = rng.normal(size=(3, n)).astype(np.float32)
            samples.append(
                Sample(
                    f"{number}-{place}",
                    np.arange(n, dtype=np.int32),
                    mask,
                    rollout_logprobs=columns[0],
                    reference_logprobs=columns[1],
                    old_values=columns[2],
                )
            )
            group.append(number // 3)
            run.append(number)
            step.append(place)
            reward.append(float(number % 2))
    order = rng.permutation(len(samples))
    facts = {"run": np.array(run)[order], "step": np.array(step)[order], "reward": np.array(reward)[order]}
    return TrainingRows([samples[i] for i in order], np.array(group)[order], "", facts)


def naive(rows: TrainingRows, step_reward: Callable[[int, int], float] | None = None) -> dict[str, np.ndarray]:
    """Whitened advantages of every row's trained tokens, by the definition, one run after the other.

    ``step_reward`` of (run, step), NaN for none: it comes at the step's last token, the rest of the outcome at the end.
    """
    place = {sample.row_id: sample for sample in rows.samples}
    made: dict[str, np.ndarray] = {}
    for number in range(18):
        run = [place[f"{number}-{step}"] for step in range(1 + number % 3)]
        columns = [
            np.concatenate([getattr(s, name)[s.loss_mask] for s in run]).astype(np.float64)
            for name in ("rollout_logprobs", "reference_logprobs", "old_values")
        ]
        reward = -0.2 * (columns[0] - columns[1])
        advantage, carried, following = np.zeros(len(reward)), 0.0, 0.0
        rest, tokens = float(number % 2), 0
        for step, sample in enumerate(run):
            tokens += np.count_nonzero(sample.loss_mask)
            given = float("nan") if step_reward is None else step_reward(number, step)
            if not np.isnan(given):
                reward[tokens - 1 : tokens] += given  # a step without trained tokens: at the last token before it
                rest -= given
        if len(reward):
            reward[-1] += rest
        for t in reversed(range(len(reward))):
            carried = reward[t] + 0.98 * following - columns[2][t] + 0.98 * 0.9 * carried
            advantage[t], following = carried, columns[2][t]
        ends = np.cumsum([np.count_nonzero(s.loss_mask) for s in run])
        made |= {s.row_id: part for s, part in zip(run, np.split(advantage, ends[:-1]), strict=True)}
    every = np.concatenate(list(made.values()))
    return {name: (part - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8) for name, part in made.items()}


def one_rank(values: Tensor, op: Literal["sum", "max"]) -> Tensor:
    return values


def check(rows: TrainingRows, mine: np.ndarray, wanted: dict[str, np.ndarray]) -> None:
    for row in mine:
        sample = rows.samples[row]
        assert isinstance(sample.advantage, np.ndarray) and sample.advantage.dtype == np.float32
        np.testing.assert_allclose(sample.advantage[sample.loss_mask], wanted[sample.row_id], atol=1e-5)
        assert not sample.advantage[~sample.loss_mask].any()


def test_advantages_are_the_definition_whatever_the_order_of_the_rows() -> None:
    rows = make_rows()
    everything = np.arange(len(rows.samples))
    made = set_token_advantages(rows, everything, SPEC, None, one_rank)
    check(rows, everything, naive(rows))
    kl = np.concatenate([(s.rollout_logprobs - s.reference_logprobs)[s.loss_mask] for s in rows.samples])
    assert made.metrics["kl_penalty"] == pytest.approx(kl.mean(), abs=1e-6)


def test_step_rewards_are_at_their_steps() -> None:
    def step_reward(run: int, step: int) -> float:
        return float("nan") if (run + step) % 3 == 0 else 0.25 * step - 0.1 * run

    rows, plain = make_rows(), make_rows()
    place = [sample.row_id.split("-") for sample in rows.samples]
    rows.facts["step_reward"] = np.array([step_reward(int(run), int(step)) for run, step in place])
    plain.facts["step_reward"] = np.full(len(place), np.nan)
    everything = np.arange(len(place))
    for made in (rows, plain):
        set_token_advantages(made, everything, SPEC, None, one_rank)
    check(rows, everything, naive(rows, step_reward))
    check(plain, everything, naive(plain))


def masked_rows(rows: TrainingRows, masked: np.ndarray) -> TrainingRows:
    """The same rows, some masked: they have facts only."""
    facts = {name: values[masked] for name, values in rows.facts.items()} | {"group": rows.group[masked]}
    kept = np.flatnonzero(~masked)
    facts.setdefault("step_reward", np.full(masked.sum(), np.nan))
    return TrainingRows(
        [rows.samples[row] for row in kept],
        rows.group[kept],
        "",
        {name: values[kept] for name, values in rows.facts.items()},
        masked=facts,
    )


def test_the_baseline_counts_masked_runs() -> None:
    """Rewards 1, 1, 0, 0; the runs with 0 are masked. The mean is 1/2, so both trained runs have advantage 1/2."""
    samples = [
        Sample(str(run), np.arange(4, dtype=np.int32), np.array([False, True, True, True]), np.zeros(4, np.float32))
        for run in range(4)
    ]
    facts = {"run": np.arange(4), "step": np.zeros(4, np.int64), "reward": np.array([1.0, 1.0, 0.0, 0.0])}
    spec = AlgorithmSpec(
        token_advantage="reinforce_plus_plus", token_advantage_args={"baseline": True, "whiten": False}
    )
    for masked in ([False] * 4, [False, False, True, True]):
        rows = masked_rows(TrainingRows(samples, np.zeros(4, np.int64), "", facts), np.array(masked))
        set_token_advantages(rows, np.arange(len(rows.samples)), spec, None, one_rank)
        for sample in rows.samples[:2]:
            assert sample.advantage.tolist() == [0, 0.5, 0.5, 0.5]


def test_a_masked_step_is_a_step_without_trained_tokens() -> None:
    def step_reward(run: int, step: int) -> float:
        return float("nan") if (run + step) % 3 == 0 else 0.25 * step - 0.1 * run

    rows = make_rows()
    place = [sample.row_id.split("-") for sample in rows.samples]
    rows.facts["step_reward"] = np.array([step_reward(int(run), int(step)) for run, step in place])
    masked = np.arange(len(place)) % 4 == 1
    for row in np.flatnonzero(masked):
        rows.samples[row].loss_mask[:] = False
    kept = masked_rows(rows, masked)
    everything = np.arange(len(kept.samples))
    set_token_advantages(kept, everything, SPEC, None, one_rank)
    check(kept, everything, naive(rows, step_reward))


def test_two_ranks_that_share_rows_over_two_epochs_equal_one() -> None:
    """In the second epoch a task may be on the other rank: then both have it, and it still counts once."""
    rows = make_rows()
    cost = np.ones(len(rows.samples))
    steps = list(group_steps(rows.group, 12, seed=1, epochs=2))
    mine = [
        np.unique(np.concatenate([share_of_rank(step, rows.group, cost[step], rank, 2) for step in steps]))
        for rank in range(2)
    ]
    assert 0 < len(np.intersect1d(*mine)) < len(rows.samples)
    for part in mine:  # a run is never cut
        assert not set(rows.facts["run"][part]) & set(np.delete(rows.facts["run"], part))
    barrier, given = threading.Barrier(2, timeout=60), dict[int, Tensor]()

    def reduce_of(rank: int) -> Callable[..., Tensor]:
        def reduce(values: Tensor, op: Literal["sum", "max"]) -> Tensor:
            given[rank] = values
            barrier.wait()
            total = given[0] + given[1]
            barrier.wait()
            return total

        return reduce

    made: dict[int, Any] = {}
    parts = [make_rows() for _ in range(2)]

    def work(rank: int) -> None:
        reduce = reduce_of(rank)
        made[rank] = set_token_advantages(parts[rank], mine[rank], SPEC, None, reduce)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = set_token_advantages(rows, np.arange(len(rows.samples)), SPEC, None, one_rank)
    assert made[0].metrics == made[1].metrics == pytest.approx(alone.metrics)
    assert made[0].kl_control == made[1].kl_control
    assert made[0].kl_control.coef == pytest.approx(alone.kl_control.coef) != 0.2
    for rank in range(2):
        check(parts[rank], mine[rank], naive(rows))


def test_a_rank_without_rows_takes_part() -> None:
    rows = make_rows()
    nothing = np.zeros(0, np.int64)
    made = set_token_advantages(rows, nothing, SPEC, None, one_rank)
    assert made.metrics["kl_penalty"] == 0


def test_choices_of_one_call_are_no_line_of_steps() -> None:
    rows = make_rows()
    again = np.flatnonzero((rows.facts["run"] == 5) & (rows.facts["step"] == 2))
    rows.facts["step"][again] = 1
    twins = "|".join(rows.samples[row].row_id for row in np.flatnonzero(rows.facts["run"] == 5))
    elsewhere = np.flatnonzero(rows.group == 0)  # a rank that has other rows stops, too
    for mine in (np.arange(len(rows.samples)), elsewhere):
        with pytest.raises(UserError, match=rf"1 rows belong to a step of a run .*\(({twins})\).* alternatives"):
            set_token_advantages(rows, mine, SPEC, None, one_rank)


def test_a_penalty_in_an_unused_reward_is_refused() -> None:
    distilled = AlgorithmSpec(token_advantage="on_policy_distill", kl_penalty=KlPenaltySpec(coef=0.1))
    with pytest.raises(UserError, match="token advantage 'on_policy_distill' does not read: remove the penalty"):
        check_token_parts(distilled)
    check_token_parts(replace(distilled, kl_penalty=None))
    check_token_parts(SPEC)


def test_the_error_names_rows_without_the_columns_of_the_advantage() -> None:
    rows = make_rows()
    rows.samples[3].old_values = None
    reduce = one_rank
    with pytest.raises(UserError, match=rf"1 rows have no old_values \({rows.samples[3].row_id}\)"):
        set_token_advantages(rows, np.arange(len(rows.samples)), SPEC, None, reduce)
    plain = TrainingRows(rows.samples, rows.group, "")
    with pytest.raises(UserError, match="these rows have no runs and no rewards"):
        set_token_advantages(plain, np.arange(len(rows.samples)), SPEC, None, reduce)
