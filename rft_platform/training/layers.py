"""Layers computed in other ways than one by one in full: activations checkpointed, code compiled.

Compilation (``torch.compile``) pays where shapes repeat: packs then have one of few static lengths
(``packing.static_length``), and a layer is compiled once a length. Attention is a break in the graph (``attention``).
"""

from typing import Any

import torch
from torch import nn

from rft_platform.errors import UserError

#: Variants of a layer's code that may be compiled: lengths x (training, scoring) x models of one class, and some room.
COMPILED_VARIANTS = 32


def prepare_layers(model: Any, layers: nn.ModuleList, *, checkpointing: bool, compiled: bool) -> None:
    """Checkpoint and compile the ``layers`` of ``model``; before sharding."""
    if checkpointing:
        _checkpoint(model, layers)
    if compiled:
        _compile(layers)


def own_memory(model: nn.Module) -> None:
    """Copy the weights out of the file they are mapped from: its tensors begin at any byte, and it may be replaced."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()


def _checkpoint(model: Any, layers: nn.ModuleList) -> None:
    """Let transformers checkpoint each layer. It asks for training mode: of the layer itself, not of its dropouts."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(f"a {type(model).__name__} has no gradient checkpointing in transformers: turn it off")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


def _compile(layers: nn.ModuleList) -> None:
    """Compile what a layer does, but not its hooks: FSDP's gather weights and must run as they are.

    Code that would be compiled over and over is an error, for what torch would fall back to is slow without a word.
    """
    torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process so far: it should not grow after a training's first step."""
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))
