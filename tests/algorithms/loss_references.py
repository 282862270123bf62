"""Every loss written down a second time: float64 NumPy, token by token values and gradients by logp, no autograd."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rft_platform.algorithms.losses.registry import TokenBatch

Array = np.ndarray


@dataclass
class Case:
    """Random tokens of a few rows of different lengths, in mixed order; log-probs near those of the samplers."""

    logp: Array
    entropy: Array
    advantage: Array
    row: Array
    behaviour: Array
    old: Array
    reference: Array
    expert: Array
    divergence: Array
    group: Array  # [rows]
    selected: Array

    def tokens(self) -> TokenBatch:
        """The same as tensors, float64, ``logp``, ``entropy`` and ``divergence`` with gradients."""

        def leaf(values: Array) -> torch.Tensor:
            return torch.from_numpy(values.copy()).requires_grad_()

        return TokenBatch(
            logp=leaf(self.logp),
            entropy=leaf(self.entropy),
            advantage=torch.from_numpy(self.advantage),
            row=torch.from_numpy(self.row),
            rows=len(self.group),
            rollout_logprobs=torch.from_numpy(self.behaviour),
            old_logprobs=torch.from_numpy(self.old),
            reference_logprobs=torch.from_numpy(self.reference),
            row_group=torch.from_numpy(self.group),
            divergence=leaf(self.divergence),
            expert=torch.from_numpy(self.expert),
            selected=torch.from_numpy(self.selected),
            kl_baseline=torch.full((len(self.logp),), KL_BASELINE, dtype=torch.float64),
        )

    @property
    def ratio(self) -> Array:
        return np.exp(np.clip(self.logp - self.old, -20, 20))

    def rows(self) -> list[Array]:
        """Indices of each row's tokens."""
        return [np.flatnonzero(self.row == r) for r in range(len(self.group))]


def random_case(seed: int, *, spread: float = 0.8, pairs: bool = False) -> Case:
    """``spread`` is the standard deviation of the log-ratios; with ``pairs`` rows are chosen / rejected answers."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, 8)
    row = rng.permutation(np.repeat(np.arange(8), lengths))
    n = len(row)
    logp = -rng.exponential(1.5, n)
    old = logp + rng.normal(0, spread, n)
    advantage = rng.normal(0, 1.5, n)
    advantage[rng.random(n) < 0.1] = 0.0
    group = np.arange(8)
    if pairs:
        group = rng.permutation(np.repeat(np.array([0, 1, 3, 4]), 2))  # numbers with a gap
        first = np.array([r == np.flatnonzero(group == group[r])[0] for r in range(8)])
        advantage = np.where(first[row], 1.0, -1.0)
    return Case(
        logp,
        rng.random(n),
        advantage,
        row,
        old + rng.normal(0, 0.2, n),
        old,
        logp + rng.normal(0, 0.5, n),
        (row % 3 == 0).astype(float),
        rng.random(n),
        group,
        (rng.random(n) < 0.3).astype(float),
    )


KL_BASELINE = 0.7  # of every case, in nats

Reference = Callable[..., tuple[Array, Array]]
"""``(case, **options) -> (value [N], gradient of the SUM of the values by logp [N])``."""


def ppo(c: Case, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 3.0) -> tuple[Array, Array]:
    r, a = c.ratio, c.advantage
    value, gradient = np.empty(len(r)), np.empty(len(r))
    for t in range(len(r)):
        options = [(-a[t] * r[t], -a[t] * r[t])]
        bounded = min(max(r[t], 1 - clip_low), 1 + clip_high)
        options.append((-a[t] * bounded, -a[t] * r[t] if bounded == r[t] else 0.0))
        worst = max(options, key=lambda option: option[0])
        if dual_clip is not None and a[t] < 0 and worst[0] > -dual_clip * a[t]:
            worst = (-dual_clip * a[t], 0.0)
        value[t], gradient[t] = worst
    return value, gradient


def gspo(c: Case, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Array, Array]:
    value, gradient = np.empty(len(c.logp)), np.empty(len(c.logp))
    for tokens in c.rows():
        s = float(np.prod(c.ratio[tokens]) ** (1 / len(tokens)))
        for t in tokens:
            a = c.advantage[t]
            cut = (a > 0 and s > 1 + clip_high) or (a < 0 and s < 1 - clip_low)
            value[t] = -a * (min(max(s, 1 - clip_low), 1 + clip_high) if cut else s)
            gradient[t] = 0.0 if cut else -a * s
    return value, gradient


def gmpo(c: Case, clip_low: float = 0.4, clip_high: float = 0.4) -> tuple[Array, Array]:
    """Equation 4 of the paper: the geometric mean of the ratios, each bounded on the side that its sign says."""
    value, gradient = np.empty(len(c.logp)), np.empty(len(c.logp))
    for tokens in c.rows():
        product, free = 1.0, {}
        for t in tokens:
            r = c.ratio[t]
            bounded = min(r, np.exp(clip_high)) if c.advantage[t] > 0 else max(r, np.exp(-clip_low))
            product, free[t] = product * bounded, bounded == r
        s = product ** (1 / len(tokens))
        for t in tokens:
            value[t] = -c.advantage[t] * s
            gradient[t] = -c.advantage[t] * s * free[t]
    return value, gradient


def rec(
    c: Case, clip_mode: str = "one-side", weight: str = "none", clip_low: float = 0.2, clip_high: float = 0.2,
    ring_low: float = 0.6, ring_high: float = 2.0,
) -> tuple[Array, Array]:  # fmt: skip
    slope = np.empty(len(c.logp))
    for t, (r, a) in enumerate(zip(c.ratio, c.advantage, strict=True)):
        inside = 1 - clip_low <= r <= 1 + clip_high
        kept = {
            "none": True,
            "one-side": r <= 1 + clip_high if a > 0 else r >= 1 - clip_low,
            "two-side": inside,
            "ring": inside or (r <= 1 - ring_low if a > 0 else r >= 1 + ring_high),
        }[clip_mode]
        slope[t] = -a * kept * (r if weight == "importance_sampling" else 1.0)
    return slope * c.logp, slope


def sppo(c: Case, epsilon: float = 0.3) -> tuple[Array, Array]:
    value, gradient = np.empty(len(c.logp)), np.empty(len(c.logp))
    for t, r in enumerate(c.ratio):
        bounded = min(max(r, 1 / (1 + epsilon)), 1 + epsilon)
        value[t] = -c.advantage[t] * np.log(bounded)
        gradient[t] = -c.advantage[t] if bounded == r else 0.0
    return value, gradient


def clip_cov(c: Case, clip_low: float = 0.2, clip_high: float = 0.2, **selection: float) -> tuple[Array, Array]:
    value, gradient = ppo(c, clip_low, clip_high, None)
    return value, np.where(c.selected > 0, 0.0, gradient)


def entropy_clip(
    c: Case, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 3.0, **selection: float
) -> tuple[Array, Array]:
    value, gradient = ppo(c, clip_low, clip_high, dual_clip)
    return value, np.where(c.selected > 0, 0.0, gradient)


def kl_cov(c: Case, kl_coef: float = 1.0, select_ratio: float = 0.0) -> tuple[Array, Array]:
    far = c.logp - c.old
    value, gradient = -c.advantage * np.exp(far), -c.advantage * np.exp(far)
    for t in np.flatnonzero(c.selected):
        value[t] += kl_coef * abs(far[t])
        gradient[t] += kl_coef if far[t] > 0 else -kl_coef
    return value, gradient


def cispo(c: Case, clip_low: float = 1.0, clip_high: float = 0.28) -> tuple[Array, Array]:
    weight = np.minimum(np.maximum(c.ratio, 1 - clip_low), 1 + clip_high)
    return -weight * c.advantage * c.logp, -weight * c.advantage


def sapo(c: Case, tau_pos: float = 1.0, tau_neg: float = 1.05) -> tuple[Array, Array]:
    tau = np.where(c.advantage > 0, tau_pos, tau_neg)
    p = 1 / (1 + np.exp(-tau * (c.ratio - 1)))
    return -p * 4 / tau * c.advantage, -4 * p * (1 - p) * c.ratio * c.advantage


def topr(c: Case, trajectory: bool = False) -> tuple[Array, Array]:
    rho = c.ratio.copy()
    if trajectory:
        for tokens in c.rows():
            rho[tokens] = np.prod(c.ratio[tokens])
    alpha = np.where(c.advantage > 0, 1.0, np.clip(rho, 0, 1))
    return -alpha * c.advantage * c.logp, -alpha * c.advantage


def reinforce(c: Case) -> tuple[Array, Array]:
    return -c.advantage * c.logp, -c.advantage


def opmd(c: Case, tau: float = 1.0) -> tuple[Array, Array]:
    return -c.advantage * c.logp / (1 + tau), -c.advantage / (1 + tau)


def sft(c: Case) -> tuple[Array, Array]:
    return -c.logp, -np.ones(len(c.logp))


def dpo(c: Case, beta: float = 0.1, label_smoothing: float = 0.0) -> tuple[Array, Array]:
    value, gradient = np.empty(len(c.logp)), np.empty(len(c.logp))
    rows, s = c.rows(), label_smoothing
    for pair in np.unique(c.group):
        one, two = np.flatnonzero(c.group == pair)
        w, lost = (one, two) if c.advantage[rows[one][0]] > 0 else (two, one)
        d = beta * ((c.logp - c.reference)[rows[w]].sum() - (c.logp - c.reference)[rows[lost]].sum())
        up, down = 1 / (1 + np.exp(-d)), 1 / (1 + np.exp(d))
        loss = -(1 - s) * np.log(up) - s * np.log(down)
        slope = 2 * beta * (-(1 - s) * down + s * up)  # two rows carry the pair's loss once each
        for r, sign in ((w, 1.0), (lost, -1.0)):
            value[rows[r]] = loss / len(rows[r])
            gradient[rows[r]] = sign * slope
    return value, gradient


def _per_pair(c: Case, loss_of: Callable[[Array, Array], tuple[float, float, float]]) -> tuple[Array, Array]:
    """``loss_of`` takes indices of the chosen and the rejected tokens; it gives loss and slopes by a token of each."""
    value, gradient = np.empty(len(c.logp)), np.empty(len(c.logp))
    rows = c.rows()
    for pair in np.unique(c.group):
        one, two = (rows[r] for r in np.flatnonzero(c.group == pair))
        w, lost = (one, two) if c.advantage[one[0]] > 0 else (two, one)
        loss, up, down = loss_of(w, lost)
        for tokens, slope in ((w, up), (lost, down)):
            value[tokens] = loss / len(tokens)
            gradient[tokens] = 2 * slope  # two rows carry the pair's loss once each
    return value, gradient


def ipo(c: Case, beta: float = 0.1, length_normalize: bool = False) -> tuple[Array, Array]:
    def loss_of(w: Array, lost: Array) -> tuple[float, float, float]:
        n, m = (len(w), len(lost)) if length_normalize else (1, 1)
        h = (c.logp - c.reference)[w].sum() / n - (c.logp - c.reference)[lost].sum() / m
        far = h - 0.5 / beta
        return far**2, 2 * far / n, -2 * far / m

    return _per_pair(c, loss_of)


def hinge(c: Case, beta: float = 0.1) -> tuple[Array, Array]:
    def loss_of(w: Array, lost: Array) -> tuple[float, float, float]:
        h = (c.logp - c.reference)[w].sum() - (c.logp - c.reference)[lost].sum()
        return (1 - beta * h, -beta, beta) if beta * h < 1 else (0.0, 0.0, 0.0)

    return _per_pair(c, loss_of)


def kto(
    c: Case, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> tuple[Array, Array]:
    value, gradient = np.empty(len(c.logp)), np.empty(len(c.logp))
    rows = c.rows()
    for group in np.unique(c.group):
        members = [rows[r] for r in np.flatnonzero(c.group == group)]  # two rows of a pair, or one without a partner
        losses = []
        for tokens in members:
            desirable = c.advantage[tokens[0]] > 0
            weight, sign = (desirable_weight, 1.0) if desirable else (undesirable_weight, -1.0)
            good = 1 / (1 + np.exp(-beta * sign * ((c.logp - c.reference)[tokens].sum() - KL_BASELINE)))
            losses.append(weight * (1 - good))
            gradient[tokens] = -weight * beta * sign * good * (1 - good)
        for tokens in members:
            value[tokens] = np.mean(losses) / len(tokens)
    return value, gradient


def simpo(c: Case, beta: float = 2.0, gamma: float = 1.0) -> tuple[Array, Array]:
    def loss_of(w: Array, lost: Array) -> tuple[float, float, float]:
        z = beta * c.logp[w].mean() - beta * c.logp[lost].mean() - gamma
        slope = beta / (1 + np.exp(z))
        return float(np.log1p(np.exp(-z))), -slope / len(w), slope / len(lost)

    return _per_pair(c, loss_of)


def orpo(c: Case, beta: float = 0.1) -> tuple[Array, Array]:
    def loss_of(w: Array, lost: Array) -> tuple[float, float, float]:
        p, q = np.exp(c.logp[w].mean()), np.exp(c.logp[lost].mean())
        odds_ratio = (p / (1 - p)) / (q / (1 - q))
        wrong = 1 / (1 + odds_ratio)  # 1 - sigmoid(log odds_ratio)
        loss = -np.log(p) - beta * np.log(odds_ratio / (1 + odds_ratio))
        return float(loss), (-1 - beta * wrong / (1 - p)) / len(w), beta * wrong / (1 - q) / len(lost)

    return _per_pair(c, loss_of)


def mix(c: Case, phi: bool = False, **options: Any) -> tuple[Array, Array]:
    value, gradient = ppo(c, **options)
    weight = np.exp(c.logp) - np.exp(2 * c.logp) if phi else np.ones(len(c.logp))
    return np.where(c.expert > 0, -weight * c.logp, value), np.where(c.expert > 0, -weight, gradient)


REFERENCES: dict[str, Reference] = {
    "ppo": ppo, "gspo": gspo, "gmpo": gmpo, "rec": rec, "cispo": cispo, "sapo": sapo, "topr": topr,
    "clip_cov": clip_cov, "kl_cov": kl_cov, "clip_b": entropy_clip, "clip_v": entropy_clip, "sppo": sppo,
    "reinforce": reinforce, "opmd": opmd, "sft": sft, "dpo": dpo, "ipo": ipo, "hinge": hinge, "simpo": simpo,
    "orpo": orpo, "kto": kto, "mix": mix,
}  # fmt: skip
#: Losses of preference pairs.
PAIRED = {"dpo", "ipo", "hinge", "simpo", "orpo", "kto"}


def with_wide_rows(case: Case) -> Case:
    """The same with log-ratios so small that whole-row ratios stay inside GSPO's narrow clip here and there."""
    return replace(case, old=case.logp + (case.old - case.logp) * 5e-4)
