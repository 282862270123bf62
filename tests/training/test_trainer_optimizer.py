"""The schedule is a function of the global step alone."""

import math

import pytest
import torch
from torch import nn

from rft_platform.algorithms.spec import OptimizerSpec
from rft_platform.common.errors import UserError
from rft_platform.training.models.optimizer import (
    apply_step,
    build_optimizer,
    check_schedule,
    clip_gradients,
    learning_rate,
)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, *(0.5 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3)), 0.0]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    spec = OptimizerSpec(lr=1.0, lr_scheduler_type=schedule, lr_warmup_steps=2, schedule_start=10, total_steps=16)
    assert [learning_rate(spec, 10 + step) for step in range(7)] == pytest.approx(expected)
    assert learning_rate(spec, 100) == (1.0 if schedule == "constant" else 0.0)


def test_a_decay_needs_an_end() -> None:
    with pytest.raises(UserError, match="total_steps, which is None"):
        check_schedule(OptimizerSpec(lr_scheduler_type="linear"))
    with pytest.raises(UserError, match="from step 12"):
        check_schedule(OptimizerSpec(lr_scheduler_type="cosine", lr_warmup_steps=2, schedule_start=10, total_steps=12))
    check_schedule(OptimizerSpec(lr_scheduler_type="linear", total_steps=1))


def test_adamw_matches_the_formula_and_decays_matrices_only() -> None:
    layer = nn.Linear(2, 2)
    before = [p.detach().clone() for p in layer.parameters()]
    spec = OptimizerSpec(lr=0.1, weight_decay=0.5)
    optimizer = build_optimizer(layer, spec)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    assert apply_step(optimizer, spec, 0) == 0.1
    # The first update of Adam is lr * sign(gradient), whatever the gradient's size.
    torch.testing.assert_close(layer.weight.detach(), before[0] * (1 - 0.1 * 0.5) - 0.1)
    torch.testing.assert_close(layer.bias.detach(), before[1] - 0.1)
    assert layer.weight.grad is None


def test_a_rebuilt_optimizer_keeps_its_moments() -> None:
    layer = nn.Linear(2, 2)
    first = build_optimizer(layer, OptimizerSpec(lr=0.1))
    layer.weight.grad = torch.ones_like(layer.weight)
    first.step()
    second = build_optimizer(layer, OptimizerSpec(lr=0.2, betas=(0.5, 0.5)), first)
    assert second.state[layer.weight]["exp_avg"] is first.state[layer.weight]["exp_avg"]
    assert second.param_groups[0]["betas"] == (0.5, 0.5)


def test_clipping_returns_the_norm_before() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 2.0)
    assert clip_gradients([parameter], 1.0) == pytest.approx(4.0)
    assert float(parameter.grad.norm()) == pytest.approx(1.0, rel=1e-5)
