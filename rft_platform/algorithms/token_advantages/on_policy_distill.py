"""On-policy distillation: the reverse KL to a teacher on the student's own samples (arXiv 2306.13649, 2306.08543)."""

from rft_platform.algorithms.token_advantages.registry import TokenAdvantages, Trajectories, token_advantage


@token_advantage("on_policy_distill", teacher=True, rewards=False)
def on_policy_distill(tokens: Trajectories, *, kl_coef: float = 1.0) -> TokenAdvantages:
    """``A_t = kl_coef (teacher_logp - student_logp)``: a sample of the negative reverse KL at each token."""
    assert tokens.teacher_logp is not None, "the training computes teacher log-probs before its first step"
    return TokenAdvantages(kl_coef * (tokens.teacher_logp - tokens.logp))
