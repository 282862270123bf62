"""Swap a model's weights in place: all tensors or, if one does not fit, none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rft_platform.common.errors import WeightMismatchError
from rft_platform.inference.serving.weight_files import Layout, check_names, read_headers, tie_broken


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's safetensors files, memory-mapped."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({place.file for place in read_headers(folder).values()}):
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise WeightMismatchError(f"{file}: not a complete safetensors file: {error}") from error
    return tensors


def merge_adapter(base: Path, adapter: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Full weights of ``base`` with the LoRA ``adapter`` merged in by peft."""
    tensors: dict[str, torch.Tensor] = merged_model(base, adapter, dtype).state_dict()
    return tensors


def merged_model(base: Path, adapter: Path, dtype: torch.dtype | str = "auto") -> Any:
    """The model in ``base`` with the LoRA ``adapter`` merged in; ``auto`` is the data type of the stored weights.

    Raises WeightMismatchError if the adapter does not fit the model.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    headers = read_headers(adapter)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        wrapped = PeftModel.from_pretrained(model, adapter, local_files_only=True)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise WeightMismatchError(f"{adapter}: does not fit the model in {base}: {error}") from error
    check_names(set(headers), set(get_peft_model_state_dict(wrapped)), adapter)
    return wrapped.merge_and_unload()


@torch.no_grad()
def replace_weights(module: Any, tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    """Copy ``tensors`` over the module's; raises WeightMismatchError, before anything is changed, if one does not fit.

    A tied tensor (for example the output head) may be absent, or present and equal to the tensor that it is tied to.
    """
    state = module.state_dict(keep_vars=True)
    layout = _layout(state)
    layout.check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
    for name, owner in layout.ties.items():
        if name in tensors and not torch.equal(tensors[name], tensors[owner]):
            raise tie_broken(source, name, owner)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise WeightMismatchError(f"{source}: {name} has values that are not finite")
    for name in set(tensors) - set(layout.ties):
        state[name].copy_(tensors[name])


def _layout(state: Mapping[str, torch.Tensor]) -> Layout:
    owner: dict[int, str] = {}  # address of the data -> first name
    ties = {
        name: first for name, tensor in state.items() if (first := owner.setdefault(tensor.data_ptr(), name)) != name
    }
    return Layout({name: tuple(tensor.shape) for name, tensor in state.items()}, ties)
