"""Swapping a model's weights in place: all of them or, where anything does not fit, none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rft_platform.errors import WeightMismatchError

NAMES_SHOWN = 5


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` holds a LoRA adapter in place of full weights."""
    return (folder / "adapter_config.json").exists()


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's safetensors files (mapped, not copied)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightMismatchError(f"{folder}: holds no .safetensors file")
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise WeightMismatchError(f"{file}: not a complete safetensors file: {error}") from error
    return tensors


def merge_adapter(base: Path, adapter: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Full weights of ``base`` with the LoRA ``adapter`` merged into them, through peft."""
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    given = read_tensors(adapter)
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        wrapped = PeftModel.from_pretrained(model, adapter)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise WeightMismatchError(f"{adapter}: does not fit the model in {base}: {error}") from error
    expected = {name: tensor.shape for name, tensor in get_peft_model_state_dict(wrapped).items()}
    _check_names(given, set(expected), adapter)
    tensors: dict[str, torch.Tensor] = wrapped.merge_and_unload().state_dict()
    return tensors


@torch.no_grad()
def replace_weights(module: Any, tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    """Copy ``tensors`` over the module's; raises WeightMismatchError, before anything is changed, if one does not fit.

    A tied tensor (the output head, say) may be absent, or present and equal to the one that it is tied to.
    """
    state = module.state_dict(keep_vars=True)
    owner: dict[int, str] = {}  # storage -> the first name of it
    tied = {
        name: first for name, tensor in state.items() if (first := owner.setdefault(tensor.data_ptr(), name)) != name
    }
    present_ties = {name: first for name, first in tied.items() if name in tensors}
    _check_names(tensors, (set(state) - set(tied)) | set(present_ties), source)
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise WeightMismatchError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the served model's has {tuple(state[name].shape)}"
            )
    for name, first in present_ties.items():
        if not torch.equal(tensors[name], tensors[first]):
            raise WeightMismatchError(f"{source}: {name} differs from {first}, to which the served model ties it")
    for name in set(tensors) - set(tied):
        state[name].copy_(tensors[name])


def _check_names(given: Mapping[str, torch.Tensor], expected: set[str], source: Path) -> None:
    missing, unexpected = sorted(expected - set(given)), sorted(set(given) - expected)
    if missing or unexpected:
        raise WeightMismatchError(
            f"{source}: not the tensors of the served model: "
            + "; ".join(
                f"{len(n)} {kind} ({_some(n)})" for kind, n in (("missing", missing), ("unexpected", unexpected)) if n
            )
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
