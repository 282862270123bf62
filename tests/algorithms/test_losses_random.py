"""Values and gradients of every loss on random tokens, against references written down independently."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from loss_references import PAIRED, REFERENCES, Array, Case, hinge, ppo, random_case, with_wide_rows

from rft_platform.algorithms.losses.gkd import generalized_jsd
from rft_platform.algorithms.losses.registry import LOSSES, bind
from rft_platform.algorithms.objective import Objective
from rft_platform.algorithms.spec import ObjectiveSpec
from rft_platform.common.errors import UserError

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}),
    ("ppo", {"clip_high": 0.2, "dual_clip": None}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.3, "clip_high": 0.5}),
    ("gmpo", {}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 0.9}),
    ("rec", {}),
    ("rec", {"weight": "importance_sampling", "clip_low": 0.4, "clip_high": 0.6}),
    ("rec", {"clip_mode": "none"}),
    ("rec", {"clip_mode": "two-side"}),
    ("rec", {"clip_mode": "ring"}),
    ("rec", {"clip_mode": "ring", "weight": "importance_sampling", "ring_low": 0.4, "ring_high": 0.5}),
    ("sppo", {}),
    ("sppo", {"epsilon": 1.0}),
    ("clip_cov", {}),
    ("clip_cov", {"clip_low": 0.1, "clip_high": 0.5, "select_ratio": 0.1, "cov_low": -1.0}),
    ("kl_cov", {}),
    ("clip_b", {}),
    ("clip_b", {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": None, "mu": 1.0}),
    ("clip_v", {}),
    ("clip_v", {"dual_clip": 1.5, "max_share": 0.1}),
    ("kl_cov", {"kl_coef": 0.3, "select_ratio": 0.5}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.4, "clip_high": 2.0}),
    ("sapo", {}),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 0.5}),
    ("topr", {}),
    ("topr", {"trajectory": True}),
    ("reinforce", {}),
    ("opmd", {}),
    ("opmd", {"tau": 0.25}),
    ("sft", {}),
    ("dpo", {}),
    ("dpo", {"beta": 0.7, "label_smoothing": 0.2}),
    ("ipo", {}),
    ("ipo", {"beta": 0.4, "length_normalize": True}),
    ("hinge", {}),
    ("hinge", {"beta": 0.8}),
    ("simpo", {}),
    ("simpo", {"beta": 0.5, "gamma": 0.0}),
    ("orpo", {}),
    ("orpo", {"beta": 1.5}),
    ("mix", {}),
    ("mix", {"clip_low": 0.1, "dual_clip": 1.5}),
    ("mix", {"phi": True}),
]


def gradient_of(values: torch.Tensor, leaf: torch.Tensor) -> Array:
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return gradient.numpy()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_value_and_gradient(name: str, options: dict[str, Any], seed: int) -> None:
    case = random_case(seed, pairs=name in PAIRED)
    if name == "gspo" and not options and seed % 2:
        case = with_wide_rows(case)
    tokens = case.tokens()
    out = bind(name, options).function(tokens)
    value, gradient = REFERENCES[name](case, **options)
    np.testing.assert_allclose(out.loss.detach().numpy(), value, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradient_of(out.loss, tokens.logp), gradient, rtol=1e-10, atol=1e-12)
    assert all(metric.ndim == 0 and not metric.requires_grad for metric in out.metrics.values())


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_loss_that_declares_zero_advantages_inert_has_no_loss_and_no_gradient_there(
    name: str, options: dict[str, Any]
) -> None:
    tokens = random_case(3, pairs=name in PAIRED).tokens()
    tokens.advantage, tokens.expert = torch.zeros_like(tokens.advantage), None  # demonstrations have no advantage
    bound = bind(name, options)
    out = bound.function(tokens)
    nothing = not out.loss.any() and not gradient_of(out.loss, tokens.logp).any()
    assert bound.zero_advantage_is_inert == (nothing and bound.policy_gradient)


@pytest.mark.parametrize("options", [{}, {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 0.25}])
def test_kto_of_rows_without_a_partner(options: dict[str, float]) -> None:
    pairs = random_case(5, pairs=True)
    alone = replace(pairs, group=np.arange(len(pairs.group)))
    tokens = alone.tokens()
    out = bind("kto", options).function(tokens)
    value, gradient = REFERENCES["kto"](alone, **options)
    np.testing.assert_allclose(out.loss.detach().numpy(), value, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradient_of(out.loss, tokens.logp), gradient, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(value.sum() / 2, REFERENCES["kto"](pairs, **options)[0].sum() / 2, rtol=1e-10)
    assert out.metrics["pairs"] == len(alone.group) == out.metrics["pairs_chosen"] + out.metrics["pairs_rejected"]


def test_every_registered_loss_has_a_reference() -> None:
    assert set(LOSSES.names()) == set(REFERENCES) | {"gkd"}


def test_losses_over_whole_rows_declare_it() -> None:
    whole = {name for name in LOSSES.names() if bind(name, {}).whole_rows}
    assert whole == {"gspo", "gmpo", *PAIRED}
    assert bind("topr", {"trajectory": True}).whole_rows
    assert not bind("topr", {"trajectory": False}).whole_rows


def distributions(seed: int, logits: torch.Tensor) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    teacher = rng.normal(0, 2, logits.shape)
    teacher = np.exp(teacher) / np.exp(teacher).sum(-1, keepdims=True)
    student = np.exp(logits.detach().numpy())
    return student / student.sum(-1, keepdims=True), teacher


def jsd(s: Array, t: Array, beta: float) -> Array:
    if beta in (0, 1):
        p, q = (t, s) if beta == 0 else (s, t)
        return (p * np.log(p / q)).sum(-1)
    m = beta * t + (1 - beta) * s
    return beta * (t * np.log(t / m)).sum(-1) + (1 - beta) * (s * np.log(s / m)).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_gkd_divergence_and_its_gradient_by_the_logits(beta: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(7).normal(0, 1.5, (5, 9)))
    student, teacher = distributions(3, logits)
    value, gradient = generalized_jsd(logits.log_softmax(-1), torch.from_numpy(np.log(teacher)), beta)
    np.testing.assert_allclose(value.numpy(), jsd(student, teacher, beta), rtol=1e-9)
    step = 1e-6
    for column in range(9):  # central differences of the NumPy formula
        shifted = []
        for sign in (1, -1):
            moved = logits.clone()
            moved[:, column] += sign * step
            shifted.append(jsd(distributions(3, moved)[0], teacher, beta))
        np.testing.assert_allclose(gradient[:, column].numpy(), (shifted[0] - shifted[1]) / (2 * step), atol=1e-8)


def test_gkd_is_its_divergence() -> None:
    tokens = random_case(0).tokens()
    out = bind("gkd", {"beta": 0.3}).function(tokens)
    np.testing.assert_array_equal(out.loss.detach().numpy(), tokens.divergence.detach().numpy())
    np.testing.assert_array_equal(gradient_of(out.loss, tokens.divergence), 1.0)


def weight(numerator: Array, denominator: Array, cap: float) -> Array:
    return np.minimum(np.exp(numerator - denominator), cap)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "name",
    [
        "ppo",
        "gspo",
        "gmpo",
        "rec",
        "sppo",
        "clip_cov",
        "kl_cov",
        "clip_b",
        "clip_v",
        "cispo",
        "sapo",
        "topr",
        "reinforce",
        "opmd",
    ],
)
@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
def test_exactly_one_ratio_is_counted(name: str, mode: Any, seed: int) -> None:
    case = random_case(seed)
    if mode == "bypass":
        case.old = case.behaviour
    tokens = case.tokens()
    tokens.expert = None
    out = Objective.build(ObjectiveSpec(name, {}, correction=mode, weight_cap=1.5))(tokens)
    value, gradient = REFERENCES[name](case)
    if mode == "decoupled":
        w = weight(case.old, case.behaviour, 1.5)
    else:
        w = weight(case.logp, case.behaviour, 1.5) if name in ("reinforce", "opmd") else np.ones(len(value))
    np.testing.assert_allclose(out.loss.detach().numpy(), w * value, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient_of(out.loss, tokens.logp), w * gradient, rtol=1e-9, atol=1e-12)


def rows_weight(numerator: Array, case: Case, cap: float, bound: str) -> Array:
    """The product of each row's ratios, token by token in plain Python."""
    out = np.empty(len(numerator))
    for tokens in case.rows():
        product = 1.0
        for t in tokens:
            product *= float(np.exp(numerator[t]) / np.exp(case.behaviour[t]))
        out[tokens] = product if product <= cap else cap if bound == "truncate" else 0.0
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", ["truncate", "mask"])
@pytest.mark.parametrize(("name", "mode"), [("ppo", "decoupled"), ("gspo", "decoupled"), ("reinforce", "bypass")])
def test_weights_of_tokens_and_sequences_truncated_and_masked(
    name: str, mode: Any, level: Any, bound: Any, seed: int
) -> None:
    case = random_case(seed)
    if mode == "bypass":
        case.old = case.behaviour
    tokens = case.tokens()
    tokens.expert = None
    spec = ObjectiveSpec(name, {}, correction=mode, weight_cap=1.1, weight_level=level, weight_bound=bound)
    objective = Objective.build(spec)
    assert objective.whole_rows == (level == "sequence" or name == "gspo")
    out = objective(tokens)
    value, gradient = REFERENCES[name](case)
    numerator = case.logp if mode == "bypass" else case.old
    w = np.exp(numerator - case.behaviour)
    w = np.where(w <= 1.1, w, 1.1 if bound == "truncate" else 0.0)
    if level == "sequence":
        w = rows_weight(numerator, case, 1.1, bound)
    assert (w < 1.1).any() and ((w == 1.1) | (w == 0)).any()
    np.testing.assert_allclose(out.loss.detach().numpy(), w * value, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient_of(out.loss, tokens.logp), w * gradient, rtol=1e-9, atol=1e-12)
    assert float(out.metrics["correction_weight"]) == pytest.approx(w.sum())


@pytest.mark.parametrize("seed", range(3))
def test_masks_by_the_product_and_by_a_single_token(seed: int) -> None:
    case = random_case(seed)
    case.old = case.behaviour
    tokens = case.tokens()
    tokens.expert = None
    spec = ObjectiveSpec("ppo", {}, row_mask=(0.3, 3.0), row_mask_ratio="product", token_veto=0.5)
    out = Objective.build(spec)(tokens)
    value, gradient = ppo(case)
    product, veto = np.ones(len(value)), np.ones(len(value))
    for index in case.rows():
        product[index] = 0.3 <= np.prod(case.ratio[index]) <= 3.0
        veto[index] = all(case.ratio[t] >= 0.5 for t in index)
    assert 0 < product.sum() < len(value) and 0 < veto.sum() < len(value)
    np.testing.assert_allclose(out.loss.detach().numpy(), product * veto * value, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient_of(out.loss, tokens.logp), product * veto * gradient, rtol=1e-9, atol=1e-12)
    assert (float(out.metrics["row_masked"]), float(out.metrics["row_vetoed"])) == (
        (1 - product).sum(),
        (1 - veto).sum(),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_whole_objective(kl: str, seed: int) -> None:
    case = random_case(seed)
    case.old = case.behaviour
    tokens = case.tokens()
    tokens.expert = None
    objective = Objective.build(
        ObjectiveSpec("ppo", {}, beta=0.3, kl_loss=kl, entropy_coef=0.02, token_mask=(0.5, 2.0), row_mask=(0.8, 1.25))
    )
    out = objective(tokens)
    value, gradient = ppo(case)
    ratio = case.ratio
    keep = ((ratio >= 0.5) & (ratio <= 2)).astype(float)
    for index in case.rows():
        keep[index] *= 0.8 <= np.exp(np.log(ratio[index]).mean()) <= 1.25
    d = case.reference - case.logp
    divergence = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[kl]
    slope = {"k1": np.ones_like(d), "k2": -d, "k3": 1 - np.exp(d)}[kl]
    rho = np.minimum(ratio, 2)
    want = keep * value + 0.3 * rho * divergence - 0.02 * case.entropy
    np.testing.assert_allclose(out.loss.detach().numpy(), want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient_of(out.loss, tokens.logp), keep * gradient + 0.3 * rho * slope, atol=1e-10)
    np.testing.assert_allclose(gradient_of(objective(tokens).loss, tokens.entropy), -0.02)
    assert float(out.metrics["token_masked"]) == (~((ratio >= 0.5) & (ratio <= 2))).sum()


@pytest.mark.parametrize("correction", ["bypass", "decoupled"])
def test_corrections_masks_and_diagnostics_exclude_demonstrations(correction: Any) -> None:
    case = random_case(5)
    case.behaviour = case.old = np.where(case.expert > 0, -40.0, case.logp)  # nobody sampled the experts
    tokens = case.tokens()
    spec = ObjectiveSpec("mix", {}, token_mask=(0.5, 2.0), row_mask=(0.9, 1.1), correction=correction)
    out = Objective.build(spec)(tokens)
    value, gradient = REFERENCES["mix"](case)
    np.testing.assert_allclose(out.loss.detach().numpy(), value, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient_of(out.loss, tokens.logp), gradient, rtol=1e-9, atol=1e-12)
    assert float(out.metrics["mismatch_abs"]) == pytest.approx(0.0, abs=1e-9)
    assert float(out.metrics["token_masked"]) == 0


def test_dpo_pairs_are_counted_by_metrics() -> None:
    case = random_case(1, pairs=True)
    metrics = bind("dpo", {"beta": 0.5}).function(case.tokens()).metrics
    rows, wins, margin = case.rows(), 0, 0.0
    for pair in np.unique(case.group):
        gain = {
            case.advantage[rows[r][0]]: 0.5 * (case.logp - case.reference)[rows[r]].sum()
            for r in np.flatnonzero(case.group == pair)
        }
        wins += gain[1.0] > gain[-1.0]
        margin += gain[1.0] - gain[-1.0]
    assert int(metrics["pairs"]) == 4
    assert int(metrics["pair_accuracy"]) == wins
    assert float(metrics["pair_margin"]) == pytest.approx(margin)
    spread = float(metrics["pair_reward_chosen"] - metrics["pair_reward_rejected"])
    assert spread == pytest.approx(margin)


def test_random_pairs_lie_on_both_sides_of_the_hinge() -> None:
    values = [hinge(random_case(seed, pairs=True), beta=0.8)[0] for seed in range(4)]
    assert 0 < np.count_nonzero(np.concatenate(values)) < len(np.concatenate(values))


def test_odds_of_a_certain_answer_are_finite() -> None:
    case = random_case(1, pairs=True)
    tokens = case.tokens()
    tokens.advantage = tokens.advantage.float()
    tokens.logp = torch.zeros(len(case.logp), requires_grad=True)  # probability 1
    out = bind("orpo", {}).function(tokens)
    assert torch.isfinite(out.loss).all() and np.isfinite(gradient_of(out.loss, tokens.logp)).all()


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("dpo", {"beta": 0.0}, "'beta'"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing"),
        ("opmd", {"tau": -1}, "tau"),
    ],
)
def test_options_out_of_range_are_user_errors(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        bind(name, options).function(random_case(0, pairs=True).tokens())


def test_float32_is_enough() -> None:
    for name, reference in REFERENCES.items():
        case: Case = random_case(2, pairs=name in PAIRED)
        tokens = case.tokens()
        for field in ("logp", "advantage", "rollout_logprobs", "old_logprobs", "reference_logprobs", "kl_baseline"):
            setattr(tokens, field, getattr(tokens, field).detach().float())
        got = bind(name, {}).function(tokens).loss
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.numpy(), reference(case)[0], rtol=1e-4, atol=1e-5)
