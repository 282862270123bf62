"""Gradients of every loss on a softmax policy over a few actions, with the expectation enumerated exactly.

Weighting action a's loss by its probability under the sampler gives the expected loss; autograd's gradient by the
policy's logits is then compared with the one worked out on paper.
"""

import pytest
import torch
from torch import Tensor

from rft_platform.algorithms.kl import kl_estimator
from rft_platform.algorithms.losses.registry import LOSSES, TokenBatch, bind

ADVANTAGE = torch.tensor([1.5, -0.5, 0.0, 2.0, -3.0], dtype=torch.float64)
POLICY = torch.tensor([0.3, -0.2, 0.8, -1.0, 0.1], dtype=torch.float64)
SAMPLER = torch.tensor([0.35, -0.25, 0.75, -1.05, 0.15], dtype=torch.float64)  # near: nothing is clipped
FAR = torch.tensor([-0.7, 0.9, 0.6, 0.4, -2.5], dtype=torch.float64)  # far: every branch of the clip is taken


def expected_gradient(name: str, policy: Tensor, sampler: Tensor, **args: object) -> Tensor:
    """Gradient by the logits of the loss's expectation under the sampler."""
    logits = policy.clone().requires_grad_()
    n = len(logits)
    logp = logits.log_softmax(0)
    tokens = TokenBatch(
        logp=logp,
        entropy=torch.zeros(n, dtype=torch.float64),
        advantage=ADVANTAGE,
        row=torch.arange(n),
        rows=n,
        behaviour_logp=sampler.log_softmax(0),
    )
    loss = bind(name, args).function(tokens).loss
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


def test_sft_is_maximum_likelihood() -> None:
    got = expected_gradient("sft", POLICY, SAMPLER)
    torch.testing.assert_close(got, POLICY.softmax(0) - SAMPLER.softmax(0))


def test_every_registered_loss_has_a_gradient_test() -> None:
    assert LOSSES.names() == ["ppo", "sft"]


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
