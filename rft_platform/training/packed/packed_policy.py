"""Models over packs: the policy, its log-probs and losses, and the passes that all packed models share.

Hidden states are used only where a token is predicted, and each distinct (state, target) is computed once
(``lm_head``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rft_platform.common.errors import UserError
from rft_platform.training.data.samples import Sample
from rft_platform.training.distributed import Reduce, most, one_rank
from rft_platform.training.packed.attention import ATTENTION, register_attention
from rft_platform.training.packed.lm_head import ChunkLoss, HeadLoss, LMHead, PackTensors
from rft_platform.training.packed.model_support import check_packable
from rft_platform.training.packed.packing import Pack, StaticLengths, pack


class PackedModel(Protocol):
    """A model that maps packs to a number per trained token: ``PackedPolicy`` or ``PackedCritic``."""

    static: StaticLengths | None
    compute_dtype: torch.dtype
    reduces_once: bool

    @property
    def device(self) -> torch.device:
        """The device of the computation; offloaded parameters are stored elsewhere."""

    @property
    def layers(self) -> nn.ModuleList:
        """Decoder layers, in order."""

    def __call__(self, batch: PackTensors) -> Any: ...


class PackedPolicy(nn.Module):
    """A causal LM of transformers (or a peft model around one) that is called with packs; shard it as the FSDP2 root.

    ``PackedPolicy(model)`` switches the model to packed attention. Apply ``fully_shard`` to each of ``policy.layers``,
    then to the policy itself. The wrapped model is ``policy.model``; save this model, because it has the parameter
    names of the HF checkpoint. ``compute_dtype`` is the dtype of the activations if it differs from that of the
    parameters (mixed precision).
    """

    def __init__(self, model: Any, *, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.runs_on: torch.device | None = None
        self.static: StaticLengths | None = None  # pad packs to these lengths
        self.compiled_for: tuple[int, ...] = ()  # lengths of packs that ``warm_up`` has compiled for
        self.reduces_once = False  # see ``prepare_backward``
        self.compute_dtype = compute_dtype or next(model.parameters()).dtype
        causal = self.causal
        check_packable(causal)
        register_attention()
        causal.set_attn_implementation(ATTENTION)
        head = causal.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UserError(f"the LM head is a {type(head).__name__}: expected a plain linear layer without an adapter")
        for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
            if getattr(causal.config, name, None) not in (None, 1.0):
                raise UserError(f"{type(causal).__name__} scales its logits ({name}): this model is not supported")

    @property
    def device(self) -> torch.device:
        """The device of the computation; offloaded parameters are stored elsewhere."""
        return self.runs_on or next(self.model.parameters()).device

    @property
    def causal(self) -> Any:
        """The causal LM itself, without a peft wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def body(self) -> Any:
        """The causal LM without its head."""
        return getattr(self.causal, self.causal.base_model_prefix)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.body.layers

    def forward(
        self,
        batch: PackTensors,
        loss_of: ChunkLoss | None = None,
        whole_rows: bool = False,
        through: Callable[[LMHead], Any] | None = None,
    ) -> Any:
        """Return the summed loss of the pack's tokens: a scalar on which to call ``backward`` once.

        Without ``loss_of``: return the log-probs [N] of the tokens in the pack's order, without gradients. With
        ``through``: return its result for the head and its input states (a custom loss).
        """
        hidden = packed_hidden(self.body, batch)
        head = self.causal.get_output_embeddings()
        if through is not None:
            return through(LMHead(hidden, head.weight, head.bias, batch))
        if loss_of is None:
            return LMHead(hidden, head.weight, head.bias, batch).score()[0].index_select(0, batch.token_pair)
        return HeadLoss.apply(hidden, head.weight, head.bias, batch, loss_of, whole_rows)


def packed_hidden(body: Any, batch: PackTensors) -> Tensor:
    """Return the final hidden states of the transformer ``body`` at the heads of a pack, [H, D]."""
    if body.config._attn_implementation != ATTENTION:
        raise RuntimeError(
            f"attention is {body.config._attn_implementation!r}, which would mix the rows of a pack: "
            f"expected {ATTENTION!r}; was the attention implementation changed after PackedPolicy was made?"
        )
    out = body(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, attention_plan=batch.plan)
    return out.last_hidden_state[0].index_select(0, batch.head_node)


def evaluate(
    model: PackedModel,
    samples: Sequence[Sample],
    *,
    max_tokens_per_pack: int,
    reduce: Reduce | None = None,
    call: Callable[[PackTensors], Tensor] | None = None,
) -> list[np.ndarray]:
    """Run ``model`` over the samples without gradients. Return its numbers per token, float32 [n] for each sample.

    ``call`` runs the model in another way that returns one number per token of the pack; default: ``model`` itself.

    Tokens that are not trained get 0. Under FSDP every rank must call it, each with its own samples. Afterwards the
    model's parameters are the shards again, not gathered copies.
    """
    packs = pack(samples, max_tokens_per_pack, static=model.static)
    values = np.zeros(sum(len(s.token_ids) for s in samples), np.float32)
    found: list[Tensor] = []
    with torch.no_grad():
        for index in range(most(len(packs), reduce or one_rank)):
            part = packs[index] if index < len(packs) else idle_pack(model, max_tokens_per_pack)
            found.append((call or model)(PackTensors.of(part, model.device, model.compute_dtype)))
    for part, value in zip(packs, found, strict=False):  # after the loop: a copy to the host waits for the device
        values[part.token_source] = value.cpu().numpy()
    release_gathered(model)
    ends = np.cumsum([len(s.token_ids) for s in samples])
    return np.split(values, ends[:-1]) if len(ends) else []


def set_values(
    model: PackedModel,
    name: str,
    samples: Sequence[Sample],
    max_tokens_per_pack: int,
    reduce: Reduce | None = None,
    call: Callable[[PackTensors], Tensor] | None = None,
) -> None:
    """Set the field ``name`` of every sample to the model's numbers per token; see ``evaluate``."""
    rows = evaluate(model, samples, max_tokens_per_pack=max_tokens_per_pack, reduce=reduce, call=call)
    for sample, values in zip(samples, rows, strict=True):
        setattr(sample, name, values)


def release_gathered(model: PackedModel) -> None:
    """Make the shards the parameters of FSDP's modules again.

    The last backward pass of a step does the same. After a forward pass without a backward pass, the parameters are
    gathered copies: an optimizer that is built in this state updates the copies, and the weights do not change.
    """
    for module in _sharded(model):
        module.reshard()


def prepare_backward(model: PackedModel, *, last: bool) -> None:
    """Tell FSDP whether the next backward pass is the ``last`` of its step. Call it before each pass of a step.

    If ``model.reduces_once``, the layers stay gathered until the last pass, and the gradients, which each rank adds up
    by then, are summed over the ranks in this pass. Otherwise every pass does both. A step that ends before its last
    pass leaves gradients behind: drop the model.
    """
    if model.reduces_once:
        for module in _sharded(model):
            module.set_is_last_backward(last)
            module.set_reshard_after_backward(last, recurse=False)
            module.set_requires_gradient_sync(last, recurse=False)


def _sharded(model: PackedModel) -> list[FSDPModule]:
    return [module for module in cast(nn.Module, model).modules() if isinstance(module, FSDPModule)]


def score(
    policy: PackedPolicy, samples: Sequence[Sample], *, max_tokens_per_pack: int, reduce: Reduce | None = None
) -> list[np.ndarray]:
    """Return the log-probs of each sample's trainable tokens (float32 arrays, in order), computed on the training path.

    Under FSDP every rank must call it; each rank gets the log-probs of the samples that it passes.
    """
    rows = evaluate(policy, samples, max_tokens_per_pack=max_tokens_per_pack, reduce=reduce)
    return [row[sample.loss_mask] for row, sample in zip(rows, samples, strict=True)]


def set_longest_row(model: PackedModel, longest: int | None) -> None:
    """Pad packs to lengths that suit rows of at most ``longest`` tokens (None: unknown)."""
    if model.static is not None:
        model.static = StaticLengths(longest)


def idle_pack(model: PackedModel, max_tokens: int) -> Pack:
    """Return the smallest pack for ``model``: one node that predicts one token."""
    row = Sample("idle", np.zeros(2, np.int32), np.array([False, True]))
    return pack([row], max_tokens, static=model.static)[0]


def warm_up(policy: PackedPolicy, max_tokens_per_pack: int) -> None:
    """Compile for every static length in advance, so that no training step has to compile.

    Runs forward and backward over two rows that share a prompt, padded to each length, and drops the gradients.
    """
    if policy.static is None or policy.compiled_for == policy.static.up_to(max_tokens_per_pack):
        return
    ids = np.arange(4, dtype=np.int32) % 2
    rows = [Sample(str(last), np.append(ids, last).astype(np.int32), np.arange(5) >= 3) for last in (0, 1)]
    (part,) = pack(rows, max_tokens_per_pack)
    policy.compiled_for = policy.static.up_to(max_tokens_per_pack)
    for length in policy.compiled_for:
        batch = PackTensors.of(replace(part, length=length), policy.device, policy.compute_dtype)
        policy(batch, lambda logp, entropy, tokens: 0.0 * (logp.sum() + entropy.sum())).backward()
    policy.zero_grad()
