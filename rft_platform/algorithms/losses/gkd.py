"""Generalised knowledge distillation: a divergence between the full distributions of student and teacher."""

import math

import torch
from torch import Tensor

from rft_platform.algorithms.common.registry import Share
from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss


@loss("gkd", policy_gradient=False, teacher=True, correction="none")
def gkd(tokens: TokenBatch, *, beta: Share = 0.5) -> TokenLoss:
    """The divergence ``generalized_jsd`` with ``beta`` at each token (Agarwal et al., arXiv 2306.13649).

    The loss needs the teacher's full distribution over the vocabulary, so the teacher runs in the trainer.
    """
    assert tokens.divergence is not None, "the step computes it for every teacher loss"
    return TokenLoss(tokens.divergence, {"divergence": tokens.divergence.detach().sum()})


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Divergence [C] in nats between log-probs [C, V], and its gradient [C, V] with respect to the student's logits.

    | beta | divergence |
    |---|---|
    | 0 | KL(T || S) |
    | 0 < beta < 1 | beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S |
    | 1 | KL(S || T) |

    With f = (1 - beta) log(S / M), or log(S / T) for beta 1, the gradient is S (f - sum(S f)); for beta 0 it is S - T.
    """
    s, t = student.exp(), teacher.exp()
    if beta == 0:
        return torch.linalg.vecdot(t, teacher - student), s - t
    if beta == 1:
        f = student - teacher
        divergence = by_student = torch.linalg.vecdot(s, f)
    else:
        mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        f = (student - mixture).mul_(1 - beta)
        by_student = torch.linalg.vecdot(s, f)
        divergence = by_student + beta * torch.linalg.vecdot(t, teacher - mixture)
    return divergence, s.mul_(f.sub_(by_student[:, None]))
