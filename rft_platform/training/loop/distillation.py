"""Distillation from the full next-token distribution of a teacher, over the same packs as the student.

Student and teacher run over one pack. At every trained token their distributions are compared, and the gradient with
respect to the student's logits is computed in the forward pass, chunk by chunk, as in ``lm_head``. No [tokens,
vocabulary] tensor is larger than a chunk. Of the teacher's forward pass only the last hidden states are kept.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rft_platform.algorithms.losses.gkd import generalized_jsd
from rft_platform.algorithms.losses.registry import PolicyLoss
from rft_platform.common.errors import UserError, some
from rft_platform.training.packed.lm_head import (
    CHUNK_ELEMENTS,
    HeadGradient,
    LMHead,
    PackTensors,
    logit_gradient,
    loss_gradient,
)
from rft_platform.training.packed.packed_policy import PackedPolicy

#: Half of the usual chunk, because memory also holds the teacher's distribution, the mixture and a second gradient.
_ELEMENTS = CHUNK_ELEMENTS // 2


class DivergenceLoss(Protocol):
    """``(logp [n], entropy [n], slice of the pack's tokens, divergence [n]) -> summed loss``."""

    def __call__(self, logp: Tensor, entropy: Tensor, tokens: slice, divergence: Tensor) -> Tensor: ...


def distillation_loss(
    student: PackedPolicy,
    teacher: PackedPolicy | None,
    batch: PackTensors,
    loss_of: DivergenceLoss,
    policy_loss: PolicyLoss,
) -> Tensor:
    """Return the summed loss of a pack's tokens. Call ``backward`` on it once; the teacher gets no gradient.

    ``policy_loss`` is a loss of kind ``teacher``; its option ``beta`` selects the divergence (``generalized_jsd``).
    Raises UserError if the vocabulary sizes of student and teacher differ.
    """
    assert teacher is not None, "the plan refuses a loss of kind teacher without one"
    beta = policy_loss.beta
    assert beta is not None, "a loss of kind teacher is registered with one"
    with torch.no_grad():
        taught: LMHead = teacher(batch, through=lambda head: head)

    def through(head: LMHead) -> Tensor:
        check_vocabulary_size(len(head.weight), len(taught.weight))
        loss: Tensor = _DistillationLoss.apply(head.hidden, head.weight, head.bias, head, taught, loss_of, beta)
        return loss

    return student(batch, through=through)


class _DistillationLoss(torch.autograd.Function):
    """``(hidden, weight, bias) -> loss``. ``forward`` computes the gradients; ``backward`` only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        student: LMHead,
        teacher: LMHead,
        loss_of: DivergenceLoss,
        beta: float,
    ) -> Tensor:
        head = LMHead(hidden, weight, bias, student.batch)
        ctx.gradient = HeadGradient.zeros(head, ctx.needs_input_grad)
        total = hidden.new_zeros((), dtype=torch.float32)
        for chunk in head.chunks(_ELEMENTS):
            log_softmax = head.log_softmax(chunk)
            divergence, by_logits = generalized_jsd(log_softmax, teacher.log_softmax(chunk), beta)
            softmax = log_softmax.exp()
            entropy = -torch.linalg.vecdot(softmax, log_softmax)
            logp = log_softmax[chunk.pair_head, chunk.pair_target]
            loss, (by_logp, by_entropy, by_divergence) = loss_gradient(
                loss_of,
                chunk.tokens,
                (logp, chunk.token_pair),
                (entropy, chunk.token_head),
                (divergence, chunk.token_head),
            )
            total = total + loss
            by_logits.mul_(0.0 if by_divergence is None else by_divergence[:, None])
            if by_logp is not None or by_entropy is not None:
                by_logits += logit_gradient(softmax, log_softmax, entropy, chunk, by_logp, by_entropy)
            if head.batch.temperature is not None:
                by_logits.div_(head.batch.temperature[chunk.heads])
            ctx.gradient.add(head, chunk, by_logits)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.gradient.scaled(by_loss), None, None, None, None


def check_vocabulary_size(student: int, teacher: int) -> None:
    """Raise UserError if the vocabulary sizes of student and teacher differ."""
    if student != teacher:
        raise UserError(
            f"the student's vocabulary has {student} tokens, the teacher's {teacher}: distillation compares them token "
            "by token, so it needs a teacher with the same tokenizer and vocabulary size"
        )


def check_vocabulary(student: Path, teacher: Path) -> None:
    """Raise UserError if two model folders differ in vocabulary size, or (if both have a fast tokenizer) in tokens."""
    check_vocabulary_size(_vocabulary_size(student), _vocabulary_size(teacher))
    tokens, others = _tokens(student), _tokens(teacher)
    if tokens is not None and others is not None and tokens != others:
        differing = sorted({token for token, _ in tokens.items() ^ others.items()})
        raise UserError(
            f"the tokenizers of student {student} ({len(tokens)} tokens) and teacher {teacher} ({len(others)} tokens) "
            f"differ in {len(differing)} tokens ({some(differing)}): distillation needs a teacher with the same "
            "tokenizer"
        )


def _vocabulary_size(folder: Path) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return int(config.get_text_config().vocab_size)


def _tokens(folder: Path) -> dict[str, int] | None:
    """Return the mapping token -> id of a folder's fast tokenizer; None if the folder has no fast tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab")
    added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    if isinstance(vocabulary, list):  # unigram models: a list of [token, score], ordered by id
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return dict(vocabulary or {}) | added
