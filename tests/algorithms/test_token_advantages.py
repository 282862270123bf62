"""Token advantages against plain float64 loops over every token, and whitening over ranks."""

import numpy as np
import pytest

from rft_platform.algorithms.token_advantages.registry import (
    TOKEN_ADVANTAGES,
    Trajectories,
    check_token_advantage,
    compute_token_advantages,
    discounted,
    whiten,
)
from rft_platform.common.errors import UserError


def trajectories(seed: int, lengths: list[int], group: list[int] | None = None) -> Trajectories:
    """Runs of these lengths with random rewards on every token, values and log-probs."""
    rng = np.random.default_rng(seed)
    start = np.append(0, np.cumsum(lengths))
    outcome = rng.normal(size=len(lengths))
    reward = 0.1 * rng.normal(size=start[-1])
    for run, length in enumerate(lengths):
        if length:
            reward[start[run + 1] - 1] += outcome[run]
    logp, teacher, value = rng.normal(size=(3, start[-1]))
    codes = np.array(group if group is not None else range(len(lengths)))
    return Trajectories(start, codes, outcome, reward, logp, teacher, value)


def naive_gae(tokens: Trajectories, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """The definition, token by token from the end of each run."""
    assert tokens.value is not None
    advantage = np.zeros(len(tokens.reward))
    for first, end in zip(tokens.start[:-1], tokens.start[1:], strict=True):
        carried, following = 0.0, 0.0
        for t in range(end - 1, first - 1, -1):
            delta = tokens.reward[t] + gamma * following - tokens.value[t]
            carried = delta + gamma * lam * carried
            advantage[t], following = carried, tokens.value[t]
    return advantage, advantage + tokens.value


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 9, 5], [0, 3, 0, 0, 7, 0], [40, 2, 2, 17]])
def test_gae_is_the_loop_over_every_token(lengths: list[int], gamma: float, lam: float) -> None:
    tokens = trajectories(3, lengths)
    out = compute_token_advantages("gae", {"gamma": gamma, "lam": lam, "whiten": False}, tokens)
    advantage, returns = naive_gae(tokens, gamma, lam)
    np.testing.assert_allclose(out.advantage, advantage, atol=1e-12)
    np.testing.assert_allclose(out.returns, returns, atol=1e-12)


def test_gae_with_lambdas_of_the_policy_by_length_and_of_the_critic() -> None:
    tokens = trajectories(9, [40, 0, 5, 100])
    args = {"gamma": 0.99, "lam_alpha": 0.05, "lam_critic": 0.9, "whiten": False}
    out = compute_token_advantages("gae", args, tokens)
    want = np.zeros(145)
    for first, end in [(0, 40), (40, 45), (45, 145)]:
        lam = {40: 0.5, 5: 0.0, 100: 0.8}[end - first]  # 1 - 1 / (0.05 T), and not below 0
        one = Trajectories(
            np.array([0, end - first]), np.zeros(1, int), np.zeros(1), tokens.reward[first:end],
            tokens.logp[first:end], value=tokens.value[first:end],
        )  # fmt: skip
        want[first:end] = naive_gae(one, 0.99, lam)[0]
    np.testing.assert_allclose(out.advantage, want, atol=1e-12)
    np.testing.assert_allclose(out.returns, naive_gae(tokens, 0.99, 0.9)[1], atol=1e-12)
    only_critic = compute_token_advantages("gae", {"lam": 0.3, "lam_critic": 1.0, "whiten": False}, tokens)
    np.testing.assert_allclose(only_critic.advantage, naive_gae(tokens, 1.0, 0.3)[0], atol=1e-12)
    np.testing.assert_allclose(only_critic.returns, naive_gae(tokens, 1.0, 1.0)[1], atol=1e-12)


def test_gae_whitens_advantages_but_not_returns() -> None:
    tokens = trajectories(4, [6, 3, 8])
    plain, returns = naive_gae(tokens, 1.0, 1.0)
    out = compute_token_advantages("gae", {}, tokens)
    np.testing.assert_allclose(out.advantage, (plain - plain.mean()) / np.sqrt(plain.var(ddof=1) + 1e-8), atol=1e-12)
    np.testing.assert_allclose(out.returns, returns, atol=1e-12)


def test_gae_with_lambda_1_is_the_return_less_the_value() -> None:
    tokens = trajectories(5, [4, 6])
    out = compute_token_advantages("gae", {"whiten": False}, tokens)
    assert tokens.value is not None
    to_go = np.concatenate([np.cumsum(tokens.reward[a:b][::-1])[::-1] for a, b in [(0, 4), (4, 10)]])
    np.testing.assert_allclose(out.advantage, to_go - tokens.value, atol=1e-12)
    np.testing.assert_allclose(out.returns, to_go, atol=1e-12)


def test_reinforce_plus_plus_is_the_whitened_reward_to_go() -> None:
    tokens = trajectories(6, [3, 0, 5, 2])
    want = np.zeros(10)
    for first, end in [(0, 3), (3, 8), (8, 10)]:
        for t in range(first, end):
            want[t] = sum(0.9 ** (s - t) * tokens.reward[s] for s in range(t, end))
    out = compute_token_advantages("reinforce_plus_plus", {"gamma": 0.9}, tokens)
    np.testing.assert_allclose(out.advantage, (want - want.mean()) / np.sqrt(want.var(ddof=1) + 1e-8), atol=1e-12)
    assert out.returns is None


def test_the_baseline_variant_subtracts_the_mean_of_the_tasks_runs_first() -> None:
    outcome = np.array([1.0, 0.0, 1.0, 5.0, 3.0])
    start = np.array([0, 2, 5, 5, 6, 9])  # the third run has no trained token, and still counts in the mean
    reward = np.zeros(9)
    reward[[1, 4, 5, 8]] = outcome[[0, 1, 3, 4]]
    tokens = Trajectories(start, np.array([0, 0, 0, 1, 1]), outcome, reward, np.zeros(9))
    out = compute_token_advantages("reinforce_plus_plus", {"baseline": True, "whiten": False}, tokens)
    want = np.repeat([1 - 2 / 3, -2 / 3, 1.0, -1.0], [2, 3, 1, 3])
    np.testing.assert_allclose(out.advantage, want, atol=1e-12)
    assert tokens.reward is reward and reward[1] == 1.0  # what was given stays as it was


def test_equal_rewards_give_exactly_zero() -> None:
    tokens = Trajectories(np.array([0, 3, 5]), np.zeros(2, int), np.full(2, 0.3), np.zeros(5), np.zeros(5))
    tokens.reward[[2, 4]] = 0.3
    for args in ({}, {"baseline": True}):
        assert not compute_token_advantages("reinforce_plus_plus", args, tokens).advantage.any()


def test_distillation_is_the_log_ratio_of_teacher_and_student() -> None:
    tokens = trajectories(7, [4, 2])
    assert tokens.teacher_logp is not None
    want = 0.5 * (tokens.teacher_logp - tokens.logp)
    out = compute_token_advantages("on_policy_distill", {"kl_coef": 0.5}, tokens)
    np.testing.assert_array_equal(out.advantage, want)
    assert TOKEN_ADVANTAGES.get("on_policy_distill").teacher and not TOKEN_ADVANTAGES.get("on_policy_distill").rewards


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "on_policy_distill"])
def test_no_token_at_all_is_no_error(name: str) -> None:
    tokens = Trajectories(np.zeros(3, int), np.zeros(2, int), np.ones(2), *np.zeros((4, 0)), share=np.zeros(0))
    assert len(compute_token_advantages(name, {}, tokens).advantage) == 0


def test_discounted_does_not_change_its_input() -> None:
    values = np.arange(5.0)
    np.testing.assert_allclose(discounted(values, np.array([0, 2, 5]), 0.5), [0.5, 1.0, 4.5, 5.0, 4.0])
    np.testing.assert_array_equal(values, np.arange(5.0))


def test_whitening_over_two_ranks_is_that_of_all_tokens() -> None:
    """Both ranks have the last four tokens; a token counts once. Their sums are exchanged as an all-reduce would."""
    values = np.random.default_rng(8).normal(3.0, 2.0, 30)
    parts = [np.r_[0:14, 26:30], np.r_[14:26, 26:30]]
    shares = [np.where(part >= 26, 0.5, 1.0) for part in parts]
    mean = values.mean()
    rounds = [
        np.array([30.0, values.sum()]),
        np.array([np.square(values - mean).sum()]),
    ]
    want = (values - mean) / np.sqrt(values.var(ddof=1) + 1e-8)
    for part, share in zip(parts, shares, strict=True):
        sent: list[np.ndarray] = []

        def total(own: np.ndarray, sent: list[np.ndarray] = sent) -> np.ndarray:
            sent.append(own)
            return rounds[len(sent) - 1]

        np.testing.assert_allclose(whiten(values[part], share, total), want[part], atol=1e-12)
        np.testing.assert_allclose(sent[0], [share.sum(), (values[part] * share).sum()])
        np.testing.assert_allclose(sent[1], [(np.square(values[part] - mean) * share).sum()])


def test_a_wrong_name_or_option_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown token advantage 'gea': did you mean 'gae'\?"):
        check_token_advantage("gea", {})
    with pytest.raises(UserError, match=r"'lambda'.*known are gamma, lam"):
        check_token_advantage("gae", {"lambda": 0.9})
    with pytest.raises(UserError, match=r"'lam_alpha' .* is 0: input should be greater than 0"):
        check_token_advantage("gae", {"lam_alpha": 0})
    with pytest.raises(UserError, match=r"'whiten'.*is 3: expected true or false"):
        check_token_advantage("gae", {"whiten": 3})
