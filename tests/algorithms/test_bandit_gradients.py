"""Gradients of every loss on a softmax policy over a few actions, with the expectation enumerated exactly.

Weighting action a's loss by its probability under the sampler gives the expected loss; autograd's gradient by the
policy's logits is then compared with the one worked out on paper.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_platform.algorithms.kl import kl_estimator
from rft_platform.algorithms.losses.gkd import generalized_jsd
from rft_platform.algorithms.losses.registry import LOSSES, TokenBatch
from rft_platform.algorithms.objective import Objective
from rft_platform.algorithms.spec import ObjectiveSpec

ADVANTAGE = torch.tensor([1.5, -0.5, 0.0, 2.0, -3.0], dtype=torch.float64)
POLICY = torch.tensor([0.3, -0.2, 0.8, -1.0, 0.1], dtype=torch.float64)
SAMPLER = torch.tensor([0.35, -0.25, 0.75, -1.05, 0.15], dtype=torch.float64)  # near: nothing is clipped
FAR = torch.tensor([-0.7, 0.9, 0.6, 0.4, -2.5], dtype=torch.float64)  # far: every branch of the clip is taken

SELECTED = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)  # for losses that select tokens


def expected_gradient(
    name: str, policy: Tensor, sampler: Tensor, *, expert: Tensor | None = None, **args: object
) -> Tensor:
    """Gradient by the logits of the objective's expectation under the sampler, whose samples it corrects for."""
    logits = policy.clone().requires_grad_()
    n = len(logits)
    logp = logits.log_softmax(0)
    tokens = TokenBatch(
        logp=logp,
        entropy=torch.zeros(n, dtype=torch.float64),
        advantage=ADVANTAGE,
        row=torch.arange(n),
        rows=n,
        rollout_logprobs=None if name == "sft" else sampler.log_softmax(0),
        expert=expert,
        selected=SELECTED,
    )
    loss = Objective.build(ObjectiveSpec(name, args))(tokens).loss
    (gradient,) = torch.autograd.grad((sampler.softmax(0) * loss).sum(), logits)
    return gradient


def policy_gradient(pi: Tensor, advantage: Tensor) -> Tensor:
    """Gradient of ``-sum_a pi_a A_a`` by the logits: ``-pi (A - E A)``."""
    return -pi * (advantage - (pi * advantage).sum())


def test_ppo_on_policy_is_the_policy_gradient() -> None:
    got = expected_gradient("ppo", POLICY, POLICY)
    torch.testing.assert_close(got, policy_gradient(POLICY.softmax(0), ADVANTAGE))


def test_ppo_off_policy_inside_the_clip_is_still_unbiased() -> None:
    got = expected_gradient("ppo", POLICY, SAMPLER)
    torch.testing.assert_close(got, policy_gradient(POLICY.softmax(0), ADVANTAGE))


def test_ppo_cuts_the_gradient_where_clip_or_dual_clip_binds() -> None:
    pi, mu = POLICY.softmax(0), FAR.softmax(0)
    ratio = pi / mu
    high = (ADVANTAGE > 0) & (ratio > 1.28)
    low = (ADVANTAGE < 0) & (ratio < 0.8)
    dual = (ADVANTAGE < 0) & (ratio > 3)
    assert high.any()
    assert low.any()
    assert dual.any()
    kept = torch.where(high | low | dual, 0.0, ADVANTAGE)
    torch.testing.assert_close(expected_gradient("ppo", POLICY, FAR), policy_gradient(pi, kept))
    without_dual = torch.where(high | low, 0.0, ADVANTAGE)
    got = expected_gradient("ppo", POLICY, FAR, dual_clip=None)
    torch.testing.assert_close(got, policy_gradient(pi, without_dual))


def along(coefficient: Tensor, pi: Tensor) -> Tensor:
    """Gradient by the logits of ``sum_a c_a logp_a``, the c detached: ``c - pi sum c``."""
    return coefficient - pi * coefficient.sum()


#: Derivative of each loss by logp where action a was taken, from its ratio and its advantage, as worked out on paper.
SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ppo": lambda r, a: -a * r * ~(((a > 0) & (r > 1.28)) | ((a < 0) & ((r < 0.8) | (r > 3)))),
    "gspo": lambda r, a: -a * r * ~(((a > 0) & (r > 1.0004)) | ((a < 0) & (r < 0.9997))),
    "gmpo": lambda r, a: -a * r * ~(((a > 0) & (r.log() > 0.4)) | ((a < 0) & (r.log() < -0.4))),
    "rec": lambda r, a: -a * ~(((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8))),
    "sppo": lambda r, a: -a * ((r <= 1.3) & (r >= 1 / 1.3)),
    "clip_cov": lambda r, a: -a * r * ~(((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8)) | (SELECTED > 0)),
    "kl_cov": lambda r, a: -a * r + SELECTED * r.log().sign(),
    "clip_b": lambda r, a: -a * r * ~(((a > 0) & (r > 1.28)) | ((a < 0) & ((r < 0.8) | (r > 3))) | (SELECTED > 0)),
    "clip_v": lambda r, a: -a * r * ~(((a > 0) & (r > 1.28)) | ((a < 0) & ((r < 0.8) | (r > 3))) | (SELECTED > 0)),
    "cispo": lambda r, a: -a * r.clamp(max=1.28),
    "sapo": lambda r, a: -a * r / torch.where(a > 0, 0.5 * (r - 1), 0.525 * (r - 1)).cosh() ** 2,
    "topr": lambda r, a: -a * torch.where(a > 0, 1.0, r.clamp(max=1.0)),
    "reinforce": lambda r, a: -a * r.clamp(max=2.0),
    "opmd": lambda r, a: -a * r.clamp(max=2.0) / 2,
    "mix": lambda r, a: -a * r * ~(((a > 0) & (r > 1.28)) | ((a < 0) & ((r < 0.8) | (r > 3)))),
    "sft": lambda r, a: -torch.ones_like(r),
}


@pytest.mark.parametrize("sampler", [POLICY, SAMPLER, FAR], ids=["on-policy", "near", "far"])
@pytest.mark.parametrize("name", SLOPES)
def test_gradient_is_the_analytic_one(name: str, sampler: Tensor) -> None:
    pi, mu = POLICY.softmax(0), sampler.softmax(0)
    got = expected_gradient(name, POLICY, sampler)
    torch.testing.assert_close(got, along(mu * SLOPES[name](pi / mu, ADVANTAGE), pi))


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "rec", "sppo", "cispo", "sapo", "topr", "reinforce", "mix"])
def test_on_policy_every_loss_is_the_policy_gradient(name: str) -> None:
    got = expected_gradient(name, POLICY, POLICY)
    torch.testing.assert_close(got, policy_gradient(POLICY.softmax(0), ADVANTAGE))


def test_opmd_takes_a_smaller_step_along_the_policy_gradient() -> None:
    got = expected_gradient("opmd", POLICY, POLICY, tau=3.0)
    torch.testing.assert_close(got, policy_gradient(POLICY.softmax(0), ADVANTAGE) / 4)


def test_reinforce_off_policy_is_unbiased_while_no_weight_is_capped() -> None:
    got = expected_gradient("reinforce", POLICY, SAMPLER)
    torch.testing.assert_close(got, policy_gradient(POLICY.softmax(0), ADVANTAGE))


def test_sft_is_maximum_likelihood() -> None:
    got = expected_gradient("sft", POLICY, SAMPLER)
    torch.testing.assert_close(got, POLICY.softmax(0) - SAMPLER.softmax(0))


def test_mix_is_maximum_likelihood_on_demonstrations() -> None:
    got = expected_gradient("mix", POLICY, SAMPLER, expert=torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(got, POLICY.softmax(0) - SAMPLER.softmax(0))


def sequence_gradient(
    name: str, policy: Tensor, sampler: Tensor, advantage: Tensor, *, spec: Any = None, **args: object
) -> Tensor:
    """The same for all sequences of two tokens over three actions, ``advantage`` [3, 3]; means over a row's tokens."""
    logits = policy.clone().requires_grad_()
    logp, mu = logits.log_softmax(0), sampler.log_softmax(0)
    actions = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # [9, 2]
    row = torch.arange(9).repeat_interleave(2)
    tokens = TokenBatch(
        logp=logp[actions].reshape(-1),
        entropy=torch.zeros(18, dtype=torch.float64),
        advantage=advantage.reshape(-1)[row],
        row=row,
        rows=9,
        rollout_logprobs=mu[actions].reshape(-1),
    )
    loss = Objective.build(ObjectiveSpec(name, args, **(spec or {})))(tokens).loss.reshape(9, 2).mean(1)
    (gradient,) = torch.autograd.grad((mu[actions].sum(1).exp() * loss).sum(), logits)
    return gradient


def sequences_along(slope: Callable[[Tensor, Tensor], Tensor], policy: Tensor, sampler: Tensor, a: Tensor) -> Tensor:
    """``sum over x, y of mu(x) mu(y) slope(rho(x) rho(y), A(x, y)) (grad logp(x) + grad logp(y)) / 2``."""
    pi, mu = policy.softmax(0), sampler.softmax(0)
    ratio = (pi / mu)[:, None] * (pi / mu)[None]
    c = mu[:, None] * mu[None] * slope(ratio, a)
    return along(c.sum(1) + c.sum(0), pi) / 2


PAIRS_OF_ACTIONS = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.5, -1.0], [-0.5, 2.0, -3.0]], dtype=torch.float64)


def test_gspo_on_sequences_weights_by_the_geometric_mean_ratio() -> None:
    def slope(ratio: Tensor, a: Tensor) -> Tensor:
        s = ratio.sqrt()
        return -a * s * ~(((a > 0) & (s > 1.2)) | ((a < 0) & (s < 0.8)))

    got = sequence_gradient("gspo", POLICY[:3], FAR[:3], PAIRS_OF_ACTIONS, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(got, sequences_along(slope, POLICY[:3], FAR[:3], PAIRS_OF_ACTIONS))


def test_gmpo_on_sequences_is_the_geometric_mean_of_bounded_ratios() -> None:
    """Autograd of the paper's objective over all nine sequences: ``-A sqrt(bounded(x) bounded(y))``."""
    logits, mu = POLICY[:3].clone().requires_grad_(), FAR[:3].log_softmax(0)
    rho = (logits.log_softmax(0) - mu).exp()
    upper, lower = rho.clamp(max=torch.tensor(0.1).exp()), rho.clamp(min=torch.tensor(-0.1).exp())
    mean = torch.where(
        PAIRS_OF_ACTIONS > 0, (upper[:, None] * upper[None]).sqrt(), (lower[:, None] * lower[None]).sqrt()
    )
    loss = ((mu[:, None] + mu[None]).exp() * -PAIRS_OF_ACTIONS * mean).sum()
    (want,) = torch.autograd.grad(loss, logits)
    got = sequence_gradient("gmpo", POLICY[:3], FAR[:3], PAIRS_OF_ACTIONS, clip_low=0.1, clip_high=0.1)
    torch.testing.assert_close(got, want)


def test_only_the_weight_of_the_sequence_makes_the_gradient_exact() -> None:
    """The gradient of ``-E[A] / 2`` under the policy, by autograd over all nine sequences, from the sampler's rows."""
    logits = POLICY[:3].clone().requires_grad_()
    logp = logits.log_softmax(0)
    expected = -(PAIRS_OF_ACTIONS * (logp[:, None] + logp[None]).exp()).sum() / 2
    (want,) = torch.autograd.grad(expected, logits)
    by_sequence, by_token = (
        sequence_gradient(
            "reinforce", POLICY[:3], FAR[:3], PAIRS_OF_ACTIONS, spec={"weight_level": level, "weight_cap": 1e6}
        )
        for level in ("sequence", "token")
    )
    torch.testing.assert_close(by_sequence, want)
    assert (by_token - want).abs().max() > 0.1


def test_topr_on_trajectories_tapers_by_the_product() -> None:
    def slope(ratio: Tensor, a: Tensor) -> Tensor:
        return -a * torch.where(a > 0, 1.0, ratio.clamp(max=1.0))

    got = sequence_gradient("topr", POLICY[:3], FAR[:3], PAIRS_OF_ACTIONS, trajectory=True)
    torch.testing.assert_close(got, sequences_along(slope, POLICY[:3], FAR[:3], PAIRS_OF_ACTIONS))


def pair_gradient(name: str, policy: Tensor, reference: Tensor, reward: Tensor, **args: object) -> Tensor:
    """All ordered pairs of actions, drawn uniformly, the winner as a Bradley-Terry judge of ``reward`` prefers."""
    logits = policy.clone().requires_grad_()
    n = len(policy)
    winner, loser = (index.reshape(-1) for index in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    logp, ref, pairs = logits.log_softmax(0), reference.log_softmax(0), n * n
    tokens = TokenBatch(
        logp=torch.cat([logp[winner], logp[loser]]),
        entropy=torch.zeros(2 * pairs, dtype=torch.float64),
        advantage=torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(pairs),
        row=torch.arange(2 * pairs),
        rows=2 * pairs,
        reference_logprobs=torch.cat([ref[winner], ref[loser]]),
        row_group=torch.arange(pairs).repeat(2),
        kl_baseline=torch.full((2 * pairs,), 0.3, dtype=torch.float64),
    )
    loss = Objective.build(ObjectiveSpec(name, args))(tokens).loss
    preferred = torch.sigmoid(reward[winner] - reward[loser]) / pairs
    (gradient,) = torch.autograd.grad((preferred.repeat(2) * loss).sum() / 2, logits)
    return gradient


def apart(values: Tensor) -> Tensor:
    """``values_w - values_l`` of every ordered pair, [winner, loser]."""
    return values[:, None] - values[None]


def orpo_slopes(pi: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    p = pi.exp()
    wrong = torch.sigmoid(-apart(pi - (1 - p).log()))
    return -1 - 0.7 * wrong / (1 - p)[:, None], 0.7 * wrong / (1 - p)[None]


def kto_slopes(pi: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    good = torch.sigmoid(0.7 * (pi - ref - 0.3))
    by_reward = 0.7 * good * (1 - good) / 2  # the same for both sides, as the sigmoid is even around 1/2
    return -by_reward[:, None].expand(-1, len(pi)), by_reward[None].expand(len(pi), -1)


#: Derivative of each pair's loss by the log-probs of its winner and its loser, [winner, loser], as worked out on paper.
PAIR_SLOPES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "dpo": lambda pi, ref: (-0.7 * torch.sigmoid(-0.7 * apart(pi - ref)), 0.7 * torch.sigmoid(-0.7 * apart(pi - ref))),
    "ipo": lambda pi, ref: (2 * apart(pi - ref) - 1 / 0.7, 1 / 0.7 - 2 * apart(pi - ref)),
    "hinge": lambda pi, ref: (-0.7 * (0.7 * apart(pi - ref) < 1), 0.7 * (0.7 * apart(pi - ref) < 1)),
    "simpo": lambda pi, ref: (-0.7 * torch.sigmoid(1 - 0.7 * apart(pi)), 0.7 * torch.sigmoid(1 - 0.7 * apart(pi))),
    "kto": kto_slopes,
    "orpo": orpo_slopes,
}


@pytest.mark.parametrize("name", PAIR_SLOPES)
def test_gradient_of_pairs_is_the_analytic_one(name: str) -> None:
    pi, ref = POLICY.log_softmax(0), FAR.log_softmax(0)
    preferred = torch.sigmoid(apart(ADVANTAGE)) / 25
    by_winner, by_loser = PAIR_SLOPES[name](pi, ref)
    got = pair_gradient(name, POLICY, FAR, ADVANTAGE, beta=0.7)
    c = (preferred * by_winner).sum(1) + (preferred * by_loser).sum(0)
    torch.testing.assert_close(got, along(c, pi.exp()))


def test_dpo_has_zero_gradient_at_its_optimum() -> None:
    best = FAR + ADVANTAGE / 0.7  # pi proportional to ref exp(reward / beta)
    got = pair_gradient("dpo", best, FAR, ADVANTAGE, beta=0.7)
    torch.testing.assert_close(got, torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_gkd_gradient_is_the_analytic_one(beta: float) -> None:
    s, t = POLICY.softmax(0), FAR.softmax(0)
    m = beta * t + (1 - beta) * s
    got = generalized_jsd(POLICY.log_softmax(0)[None], FAR.log_softmax(0)[None], beta)[1][0]
    f = {0.0: None, 1.0: s.log() - t.log()}.get(beta, (1 - beta) * (s / m).log())
    torch.testing.assert_close(got, s - t if f is None else s * (f - (s * f).sum()))


def test_every_registered_loss_has_a_gradient_test() -> None:
    assert set(LOSSES.names()) == {*SLOPES, *PAIR_SLOPES, "gkd"}


def forward_kl(pi: Tensor, ref: Tensor) -> Tensor:
    """Gradient of KL(pi || ref) by pi's logits."""
    log_ratio = pi.log() - ref.log()
    return pi * (log_ratio - (pi * log_ratio).sum())


@pytest.mark.parametrize(
    ("name", "gradient"),
    [("k1", lambda pi, ref: torch.zeros_like(pi)), ("k2", forward_kl), ("k3", lambda pi, ref: pi - ref)],
)
def test_gradient_of_kl_estimators_as_loss_terms(name: str, gradient: object) -> None:
    logits = POLICY.clone().requires_grad_()
    ref = FAR.log_softmax(0)
    divergence = kl_estimator(name)(logits.log_softmax(0), ref)
    (got,) = torch.autograd.grad((POLICY.softmax(0) * divergence).sum(), logits)
    assert callable(gradient)
    torch.testing.assert_close(got, gradient(POLICY.softmax(0), ref.exp()))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_estimate_the_divergence_without_bias(name: str) -> None:
    pi, logp, ref = POLICY.softmax(0), POLICY.log_softmax(0), FAR.log_softmax(0)
    torch.testing.assert_close((pi * kl_estimator(name)(logp, ref)).sum(), (pi * (logp - ref)).sum())


@pytest.mark.parametrize(("name", "gradient"), [("k2", forward_kl), ("k3", lambda pi, ref: pi - ref)])
def test_off_policy_the_kl_term_is_corrected(name: str, gradient: Callable[[Tensor, Tensor], Tensor]) -> None:
    ref = FAR.log_softmax(0)
    got = kl_term_gradient(name, SAMPLER, ref)
    torch.testing.assert_close(got, gradient(POLICY.softmax(0), ref.exp()))


def kl_term_gradient(name: str, sampler: Tensor, ref: Tensor) -> Tensor:
    """Gradient of the objective's KL term alone: the advantages are 0."""
    logits = POLICY.clone().requires_grad_()
    n = len(logits)
    zeros = torch.zeros(n, dtype=torch.float64)
    tokens = TokenBatch(logits.log_softmax(0), zeros, zeros, torch.arange(n), n, sampler.log_softmax(0))
    tokens.reference_logprobs = ref
    loss = Objective.build(ObjectiveSpec("ppo", {}, beta=1.0, kl_loss=name))(tokens).loss
    (gradient,) = torch.autograd.grad((sampler.softmax(0) * loss).sum(), logits)
    return gradient
