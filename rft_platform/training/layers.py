"""Activation checkpointing and compilation of a model's layers.

``torch.compile`` pays off if shapes repeat: packs then have one of few static lengths (``packing.static_length``), and
a layer is compiled once per length. Attention is a graph break (``attention``).
"""

from typing import Any

import torch
from torch import nn

from rft_platform.errors import UserError

#: Limit of compiled variants of a layer: lengths x (training, scoring) x models of one class, with some margin.
COMPILED_VARIANTS = 32


def prepare_layers(model: Any, layers: nn.ModuleList, *, checkpointing: bool, compiled: bool) -> None:
    """Set up checkpointing and compilation for the ``layers`` of ``model``. Call it before sharding."""
    if checkpointing:
        _checkpoint(model, layers)
    if compiled:
        _compile(layers)


def own_memory(model: nn.Module) -> None:
    """Copy the weights out of the memory-mapped file: its tensors may be unaligned, and the file may be replaced."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()


def _checkpoint(model: Any, layers: nn.ModuleList) -> None:
    """Let transformers checkpoint each layer. Only the layer itself is set to training mode; its dropouts stay off."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(f"a {type(model).__name__} has no gradient checkpointing in transformers: turn it off")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


def _compile(layers: nn.ModuleList) -> None:
    """Compile the forward of each layer, but not its hooks: FSDP's hooks gather weights and must run uncompiled.

    Exceeding the recompilation limit is an error, because torch's fallback is slow and gives no warning.
    """
    torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)


def compiled_graphs() -> int:
    """Number of graphs that torch.compile has made in this process. It should not grow after the first step."""
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))
