"""What a training computes for Clip-B and Clip-V: the derivative of the entropy by the sampled token's logit."""

from functools import partial

import numpy as np
import pytest
import torch
from invariance import rows_for, step
from small_model import build_model

from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop.precompute import entropy_change
from rft_platform.training.packed import lm_head
from rft_platform.training.packed.packed_policy import PackedPolicy, set_values


def by_autograd(model: torch.nn.Module, row: Sample) -> tuple[np.ndarray, np.ndarray]:
    """-dH/dz of each token's own logit, and its expectation over the vocabulary; [n], 0 where nothing is trained."""
    ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0] / row.temperature
    plain, expected = np.zeros(len(row.token_ids)), np.zeros(len(row.token_ids))
    for place in np.flatnonzero(row.loss_mask):
        z = logits[place - 1].double().requires_grad_()
        p = z.softmax(-1)
        (slope,) = torch.autograd.grad(-(p * z.log_softmax(-1)).sum(), z)
        plain[place] = -slope[row.token_ids[place]]
        expected[place] = -(p.detach() * slope).sum()
    return plain, expected


def set_entropy_change(policy: PackedPolicy, rows: list[Sample], budget: int, *, centred: bool) -> None:
    through = partial(entropy_change, centred=centred)
    set_values(policy, "entropy_change", rows, budget, call=partial(policy, through=through))


@pytest.mark.parametrize("elements", [1 << 27, 100])  # one chunk, and several of four heads
@pytest.mark.parametrize("budget", [10_000, 40])
def test_it_is_the_derivative_of_the_entropy(budget: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rft_platform.training.loop.precompute.CHUNK_ELEMENTS", elements)
    assert lm_head.CHUNK_ELEMENTS == 1 << 27
    policy, rows = PackedPolicy(build_model()), rows_for("clip_b")
    model = build_model()
    for centred in (False, True):
        set_entropy_change(policy, rows, budget, centred=centred)
        for row in rows:
            plain, expected = by_autograd(model, row)
            want = plain - expected if centred else plain
            assert row.entropy_change == pytest.approx(want, abs=2e-6)
            assert np.abs(row.entropy_change[row.loss_mask]).max() > 1e-3  # type: ignore[index]


@pytest.mark.parametrize("loss", ["clip_b", "clip_v"])
def test_a_step_leaves_out_unlikely_tokens_with_a_negative_advantage(loss: str) -> None:
    policy, rows = PackedPolicy(build_model()), rows_for(loss)
    set_entropy_change(policy, rows, 10_000, centred=loss == "clip_v")
    options = {"mu": 0.2} | ({"max_share": 0.5} if loss == "clip_v" else {})
    spec = AlgorithmSpec(policy_loss=loss, policy_loss_args=options)
    metrics, gradients = step(policy, rows, spec, policy)
    assert 0 < metrics["selected"] < 0.5
    for row in rows:
        assert row.selected is not None and row.entropy_change is not None
        assert row.advantage < 0 or not row.selected.any()
        assert (row.entropy_change[row.selected > 0] < 0).all() or loss == "clip_b"
    masked, kept = rows_for(loss), 0  # the same as masking these tokens, but for the divisor
    for row, chosen in zip(masked, rows, strict=True):
        row.loss_mask = row.loss_mask & ~(chosen.selected > 0)  # type: ignore[operator]
        kept += int(row.loss_mask.sum())
    _, want = step(policy, masked, AlgorithmSpec(policy_loss="ppo"), policy)
    share = kept / sum(int(row.loss_mask.sum()) for row in rows)
    for name, gradient in want.items():
        torch.testing.assert_close(gradients[name], gradient * share, rtol=1e-4, atol=1e-6)
