"""Layers computed in other ways than one by one in full: activations checkpointed, code compiled.

Compilation (``torch.compile``) pays where shapes repeat. Norms and MLP see the tokens of a pack as one long sequence:
packs are padded to a few lengths (``padded_length``) and a layer is compiled once a length. Attention is left out, a
break in the graph: its shapes are those of the rows, which differ from pack to pack, and it does not see the padding.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rft_platform.errors import UserError
from rft_platform.training.layout import Layout

SHORTEST = 512  # tokens that a pack is padded to at least
STEPS_A_DOUBLING = 4  # lengths between one power of two and the next: at most a quarter of a pack is padding


def prepare_layers(model: Any, body: nn.Module, layers: nn.ModuleList, layout: Layout) -> None:
    """Checkpoint and compile the ``layers`` of ``body``, the transformer of ``model``, as wanted; before sharding."""
    if layout.gradient_checkpointing:
        _checkpoint(model, layers)
    if layout.compile:
        _compile(body, layers)


def own_memory(model: nn.Module) -> None:
    """Copy the weights out of the file they are mapped from: its tensors begin at any byte, and it may be replaced."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()


def padded_length(tokens: int) -> int:
    """The length that a pack of so many tokens is padded to: 512, then four lengths a doubling."""
    if tokens <= SHORTEST:
        return SHORTEST
    step = (1 << ((tokens - 1).bit_length() - 1)) // STEPS_A_DOUBLING
    return -(-tokens // step) * step


def _checkpoint(model: Any, layers: nn.ModuleList) -> None:
    """Let transformers checkpoint each layer. It asks for training mode: of the layer itself, not of its dropouts."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(f"a {type(model).__name__} has no gradient checkpointing in transformers: turn it off")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


def _compile(body: nn.Module, layers: nn.ModuleList) -> None:
    body.register_forward_pre_hook(_pad_pack, with_kwargs=True)
    for layer in layers:
        attention: Any = layer.self_attn
        attention.forward = torch.compiler.disable(partial(_without_padding, attention.forward))
        layer.compile(dynamic=False)


def _pad_pack(body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the transformer: ids and positions [1, T] with zeros up to the padded length."""
    missing = padded_length(kwargs["input_ids"].shape[1]) - kwargs["input_ids"].shape[1]
    return args, kwargs | {name: pad(kwargs[name], (0, missing)) for name in ("input_ids", "position_ids")}


def _without_padding(
    attend: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
) -> tuple[Tensor, Any]:
    """Self-attention of the pack's own tokens; zeros for the padding."""
    tokens = kwargs["attention_plan"].nodes
    missing = hidden_states.shape[1] - tokens
    cos, sin = position_embeddings
    out, weights = attend(hidden_states[:, :tokens], position_embeddings=(cos[:, :tokens], sin[:, :tokens]), **kwargs)
    return pad(out, (0, 0, 0, missing)), weights
