"""The critic's loss and the KL coefficient against the formulas in float64 NumPy."""

import numpy as np
import pytest
import torch

from rft_platform.algorithms.kl import KlControl
from rft_platform.algorithms.value_loss import explained_variance, value_loss


def test_value_loss_and_its_gradient_are_the_formula() -> None:
    rng = np.random.default_rng(0)
    value, old, returns = rng.normal(size=(3, 400)) * 0.5
    clip = 0.2
    free, bound = (value - returns) ** 2, (np.clip(value, old - clip, old + clip) - returns) ** 2
    inside = np.abs(value - old) <= clip
    gradient = np.where(free >= bound, value - returns, np.where(inside, value - returns, 0.0))
    given = torch.tensor(value, requires_grad=True)
    out = value_loss(given, torch.tensor(old), torch.tensor(returns), clip=clip)
    out.loss.sum().backward()
    np.testing.assert_allclose(out.loss.detach().numpy(), 0.5 * np.maximum(free, bound), atol=1e-12)
    assert given.grad is not None
    np.testing.assert_allclose(given.grad.numpy(), gradient, atol=1e-12)
    assert 0 < out.metrics["value_clip_fraction"] == (bound > free).sum() < 400
    assert (gradient == 0).sum() == (bound > free).sum()  # what counts as clipped has no gradient


def test_explained_variance_from_the_sums() -> None:
    rng = np.random.default_rng(1)
    value, returns = rng.normal(size=(2, 50))
    out = value_loss(*(torch.tensor(x) for x in (value, value, returns)), clip=0.2)
    sums = {name: float(total) for name, total in out.metrics.items()}
    assert explained_variance(sums, 50) == pytest.approx(1 - np.var(returns - value) / np.var(returns), abs=1e-9)
    equal = value_loss(*(torch.tensor(x) for x in (returns, returns, returns)), clip=0.2).metrics
    assert explained_variance({name: float(total) for name, total in equal.items()}, 50) == pytest.approx(1)
    constant = value_loss(*(torch.ones(4) for _ in range(3)), clip=0.2).metrics
    assert explained_variance({name: float(total) for name, total in constant.items()}, 4) == 0


def test_the_adaptive_coefficient_moves_towards_its_target() -> None:
    control = KlControl.start(0.1)
    assert control.adapted(0.022, 500, target=0.02, horizon=5000).coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert control.adapted(9.0, 500, target=0.02, horizon=5000).coef == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert control.adapted(-1.0, 1e9, target=0.02, horizon=5000).coef == pytest.approx(0.1 * 0.8)
    assert control.adapted(0.02, 500, target=0.02, horizon=5000) == control
    for _ in range(3):
        control = control.adapted(1.0, 1e4, target=0.02, horizon=1e4)
    assert control == KlControl(0.1, pytest.approx(0.1 * 1.2**3))
    assert KlControl.of(control.to_json()) == control and KlControl.of(None) is None
