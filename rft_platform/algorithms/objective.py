"""The per-token objective: policy loss, correction and masks, KL to the reference, entropy bonus.

Three policies: pi_rollout sampled the tokens (the engine; ``rollout_logprobs``), pi_old is the trainer at the start of
the training, pi is the trainer now. Exactly one importance ratio is applied to each token:

| correction | loss with its own ratio | loss on logp alone | loss with its own clip or gate |
|---|---|---|---|
| bypass (no pi_old is computed) | rho = pi / pi_rollout | weight min(pi / pi_rollout, cap) | rho = pi / pi_rollout |
| decoupled | rho = pi / pi_old, weight w = min(pi_old / pi_rollout, cap) | weight w | as with its own ratio |

The masks use the mismatch between trainer and engine: pi / pi_rollout with bypass, pi_old / pi_rollout with decoupled.
With ``weight_level: sequence`` the ratio in a weight is the product over the row's tokens, the same for all of them.
With ``weight_bound: mask`` a weight above the cap is 0 instead of the cap.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from rft_platform.algorithms.common.ratio import (
    correction_weight,
    mismatch_sums,
    row_mask,
    row_weight,
    token_mask,
    veto_mask,
)
from rft_platform.algorithms.kl import kl_estimator
from rft_platform.algorithms.losses.registry import PolicyLoss, TokenBatch, TokenLoss, bind
from rft_platform.algorithms.spec import ObjectiveSpec


@dataclass(frozen=True, slots=True)
class Objective:
    """``mask * weight * policy_loss + beta * sg(rho) KL(policy, reference) - entropy_coef * entropy`` for each token.

    The KL estimators need samples of the policy itself: ``rho = min(pi / pi_rollout, cap)`` reweights the tokens.
    """

    policy_loss: PolicyLoss
    spec: ObjectiveSpec

    @classmethod
    def build(cls, spec: ObjectiveSpec) -> "Objective":
        """Build the objective of ``spec``. Raises UserError for an unknown name or option."""
        objective = cls(bind(spec.policy_loss, spec.policy_loss_args), spec)
        kl_estimator(spec.kl_loss)
        return objective

    @property
    def whole_rows(self) -> bool:
        """Whether all tokens of a row must be evaluated together."""
        masks = self.spec.row_mask is not None or self.spec.token_veto is not None
        return self.policy_loss.whole_rows or masks or (self.weighted and self.spec.weight_level == "sequence")

    @property
    def weighted(self) -> bool:
        """Whether the policy loss is multiplied by importance weights."""
        return self.spec.correction == "decoupled" or self.policy_loss.correction == "weight"

    @property
    def needs_reference(self) -> bool:
        """Whether tokens need their log-probs under the reference model."""
        return self.spec.beta > 0 or self.policy_loss.reference

    @property
    def zero_advantage_is_inert(self) -> bool:
        """Whether a row with advantage 0 has loss 0 and gradient 0 for any policy."""
        return self.policy_loss.zero_advantage_is_inert and self.spec.beta == 0 and self.spec.entropy_coef == 0

    def __call__(self, tokens: TokenBatch) -> TokenLoss:
        """Return the loss [N] of the tokens and the sums of all metrics."""
        if tokens.expert is not None:
            tokens = _sampled_by_itself(tokens, tokens.expert > 0)
        out = self.policy_loss.function(tokens)
        out.metrics["policy_loss"] = out.loss.detach().sum()
        out.metrics["entropy"] = tokens.entropy.detach().sum()
        if tokens.rollout_logprobs is not None:
            out.metrics |= mismatch_sums(tokens.logp, tokens.rollout_logprobs)
            self._correct(out, tokens)
            self._mask(out, tokens)
        if self.spec.beta and tokens.reference_logprobs is not None:
            divergence = kl_estimator(self.spec.kl_loss)(tokens.logp, tokens.reference_logprobs)
            out.metrics["kl"] = divergence.detach().sum()
            if tokens.rollout_logprobs is not None:  # the estimators need samples of the policy itself
                divergence = divergence * correction_weight(tokens.logp, tokens.rollout_logprobs, self.spec.weight_cap)
            out.loss = out.loss + self.spec.beta * divergence
        if self.spec.entropy_coef:
            out.loss = out.loss - self.spec.entropy_coef * tokens.entropy
        return out

    def _correct(self, out: TokenLoss, tokens: TokenBatch) -> None:
        assert tokens.rollout_logprobs is not None
        if not self.weighted:
            return
        logp, cap, bound = self._trainer_logprobs(tokens), self.spec.weight_cap, self.spec.weight_bound
        if self.spec.weight_level == "sequence":
            weight = row_weight(logp, tokens.rollout_logprobs, tokens.row, tokens.rows, cap, bound)
        else:
            weight = correction_weight(logp, tokens.rollout_logprobs, cap, bound)
        out.metrics["correction_weight"] = weight.sum()
        out.loss = out.loss * weight

    def _mask(self, out: TokenLoss, tokens: TokenBatch) -> None:
        assert tokens.rollout_logprobs is not None
        logp, rollout = self._trainer_logprobs(tokens), tokens.rollout_logprobs
        if self.spec.token_mask is not None:
            keep = token_mask(logp, rollout, *self.spec.token_mask)
            out.metrics["token_masked"] = (1 - keep).sum()
            out.loss = out.loss * keep
        if self.spec.row_mask is not None:
            keep = row_mask(logp, rollout, tokens.row, tokens.rows, *self.spec.row_mask, self.spec.row_mask_ratio)
            out.metrics["row_masked"] = (1 - keep).sum()
            out.loss = out.loss * keep
        if self.spec.token_veto is not None:
            keep = veto_mask(logp, rollout, tokens.row, tokens.rows, self.spec.token_veto)
            out.metrics["row_vetoed"] = (1 - keep).sum()
            out.loss = out.loss * keep

    def _trainer_logprobs(self, tokens: TokenBatch) -> Tensor:
        """The trainer's log-probs that weights and masks compare with the engine's."""
        logp = tokens.logp if self.spec.correction == "bypass" else tokens.old_logprobs
        assert logp is not None, "the training computes them before its first step"
        return logp


def _sampled_by_itself(tokens: TokenBatch, expert: Tensor) -> TokenBatch:
    """Set the ratio to 1 on ``expert`` tokens: no policy sampled these tokens, so they need no correction or mask."""
    own = tokens.logp.detach()

    def filled(logp: Tensor | None) -> Tensor | None:
        return None if logp is None else own.where(expert, logp)

    return replace(tokens, rollout_logprobs=filled(tokens.rollout_logprobs), old_logprobs=filled(tokens.old_logprobs))
