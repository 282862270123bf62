"""Values of the losses, the objective around them, and the mismatch diagnostics and masks."""

import math

import pytest
import torch
from torch import Tensor

from rft_platform.algorithms.common.ratio import effective_sample_share, mismatch_sums, row_mask, token_mask
from rft_platform.algorithms.losses.registry import TokenBatch, bind
from rft_platform.algorithms.objective import Objective
from rft_platform.algorithms.spec import ObjectiveSpec
from rft_platform.common.errors import UserError


def batch(ratio: list[float], advantage: list[float], row: list[int] | None = None) -> TokenBatch:
    logp = torch.tensor(ratio).log()
    rows = row or [0] * len(ratio)
    return TokenBatch(
        logp=logp,
        entropy=torch.full_like(logp, 0.5),
        advantage=torch.tensor(advantage),
        row=torch.tensor(rows),
        rows=max(rows) + 1,
        rollout_logprobs=torch.zeros_like(logp),
        reference_logprobs=torch.full_like(logp, -0.25),
    )


def test_ppo_values_and_clip_counts_by_hand() -> None:
    out = bind("ppo", {}).function(batch([1.0, 1.5, 0.5, 0.5, 4.0, 1.5], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]))
    torch.testing.assert_close(out.loss, torch.tensor([-1.0, -1.28, -0.5, 0.8, 3.0, 1.5]))
    counts = {name: int(value) for name, value in out.metrics.items()}
    assert counts == {"clip_low": 1, "clip_high": 1, "clip_dual": 1, "clip_fraction": 3}


def test_an_enormous_ratio_stays_finite() -> None:
    tokens = batch([1.0], [1.0])
    tokens.logp = torch.tensor([500.0], requires_grad=True)
    out = bind("ppo", {"clip_high": 1e12, "dual_clip": None}).function(tokens)
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all()
    assert tokens.logp.grad is not None
    assert tokens.logp.grad.item() == 0


def test_unknown_loss_and_option_are_user_errors() -> None:
    with pytest.raises(UserError, match="did you mean 'ppo'"):
        bind("ppoo", {})
    with pytest.raises(UserError, match="did you mean 'clip_high'"):
        bind("ppo", {"clip_hi": 0.3})
    with pytest.raises(UserError, match=r"'clip_high' .* is '0\.3': input should be a valid number"):
        bind("ppo", {"clip_high": "0.3"})
    assert bind("ppo", {"clip_high": 1, "dual_clip": None}).policy_gradient
    with pytest.raises(UserError, match="takes no argument"):
        bind("sft", {"clip_high": 0.3})
    with pytest.raises(UserError, match="unknown KL estimator 'k4'"):
        Objective.build(ObjectiveSpec("ppo", {}, kl_loss="k4"))


def test_objective_adds_kl_and_entropy_bonus() -> None:
    tokens = batch([1.0, 1.1], [1.0, -1.0])
    objective = Objective.build(ObjectiveSpec("ppo", {}, beta=0.1, kl_loss="k2", entropy_coef=0.01))
    plain = bind("ppo", {}).function(tokens).loss
    kl = 0.5 * (tokens.logp - tokens.reference_logprobs) ** 2
    out = objective(tokens)
    rho = torch.tensor([1.0, 1.1])  # samples of the sampler stand for samples of the policy
    torch.testing.assert_close(out.loss, plain + 0.1 * rho * kl - 0.01 * 0.5)
    torch.testing.assert_close(out.metrics["kl"], kl.sum())
    assert not objective.zero_advantage_is_inert
    assert Objective.build(ObjectiveSpec("ppo", {})).zero_advantage_is_inert
    assert not Objective.build(ObjectiveSpec("sft", {})).zero_advantage_is_inert


def test_masks_remove_tokens_and_rows_from_the_policy_loss() -> None:
    tokens = batch([1.0, 6.0, 0.4, 1.0, 3.0, 3.0], [-1.0] * 6, row=[0, 0, 0, 1, 2, 2])
    out = Objective.build(ObjectiveSpec("ppo", {"dual_clip": None}, token_mask=(0.5, 5.0)))(tokens)
    assert (out.loss != 0).tolist() == [True, False, False, True, True, True]
    assert int(out.metrics["token_masked"]) == 2
    out = Objective.build(ObjectiveSpec("ppo", {"dual_clip": None}, row_mask=(0.5, 2.0)))(tokens)
    assert (out.loss != 0).tolist() == [True, True, True, True, False, False]  # row 0: (1 * 6 * 0.4)^(1/3) = 1.34
    assert int(out.metrics["row_masked"]) == 2


def test_decoupled_masks_look_at_the_trainer_that_began_not_at_its_progress() -> None:
    tokens = batch([6.0, 6.0], [-1.0] * 2, row=[0, 1])
    assert tokens.rollout_logprobs is not None
    tokens.old_logprobs = torch.stack([tokens.rollout_logprobs[0], tokens.logp.detach()[1]])  # the second is far
    out = Objective.build(ObjectiveSpec("ppo", {"dual_clip": None}, token_mask=(0.5, 5.0), correction="decoupled"))(
        tokens
    )
    assert (out.loss != 0).tolist() == [True, False]
    assert int(out.metrics["token_masked"]) == 1


def test_row_mask_does_not_drift_with_length() -> None:
    ratio, rows = [1.05] * 1000, [0] * 1000
    tokens = batch(ratio, [1.0] * 1000, rows)
    assert tokens.rollout_logprobs is not None
    assert row_mask(tokens.logp, tokens.rollout_logprobs, tokens.row, 1, 0.9, 1.1).all()


def test_masks_carry_no_gradient() -> None:
    logp = torch.tensor([0.1], requires_grad=True)
    assert not token_mask(logp, torch.zeros(1), 0.5, 2.0).requires_grad


def sums(ratio: list[float]) -> dict[str, float]:
    logp: Tensor = torch.tensor(ratio).log()
    return {name: float(value) for name, value in mismatch_sums(logp, torch.zeros_like(logp)).items()}


def test_mismatch_by_hand() -> None:
    got = sums([1.0, 1.2, 0.95])
    assert got["mismatch_outside"] == 1
    assert got["mismatch_abs"] == pytest.approx(math.log(1.2) - math.log(0.95), rel=1e-5)
    assert got["mismatch_k3"] == pytest.approx(0.2 - math.log(1.2) - 0.05 - math.log(0.95), rel=1e-4)


def test_effective_sample_share() -> None:
    even, uneven = sums([1.3] * 4), sums([1e-4, 1e-4, 1e-4, 4.0])
    assert effective_sample_share(even["ratio"], even["ratio_squared"], 4) == pytest.approx(1.0)
    assert effective_sample_share(uneven["ratio"], uneven["ratio_squared"], 4) == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("ppo", {"clip_low": -0.1}),
        ("ppo", {"dual_clip": 1.0}),
        ("mix", {"clip_high": -1.0}),
        ("gspo", {"clip_low": -1e-4}),
        ("cispo", {"clip_high": -0.28}),
        ("sapo", {"tau_pos": 0.0}),
        ("opmd", {"tau": -1.0}),
        ("dpo", {"beta": 0.0}),
        ("dpo", {"label_smoothing": 0.5}),
        ("gmpo", {"clip_low": -0.4}),
        ("rec", {"clip_mode": "both"}),
        ("rec", {"weight": "advantage"}),
        ("rec", {"ring_high": -1.0}),
        ("sppo", {"epsilon": 0.0}),
        ("mix", {"phi": 1}),
        ("ipo", {"beta": 0.0}),
        ("hinge", {"beta": -0.1}),
        ("simpo", {"beta": 0.0}),
        ("simpo", {"gamma": -0.5}),
        ("orpo", {"beta": -0.1}),
        ("gkd", {"beta": 1.5}),
    ],
)
def test_options_out_of_bounds_are_refused_where_they_are_read(name: str, args: dict[str, float]) -> None:
    (option,) = args
    with pytest.raises(UserError, match=f"argument '{option}' of policy loss '{name}' is .*: input should be"):
        bind(name, args)


def test_none_turns_the_dual_clip_off() -> None:
    assert bind("ppo", {"dual_clip": None, "clip_low": 0, "clip_high": 0.0}).policy_gradient
