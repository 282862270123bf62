"""Check from a model's config.json whether it can be trained, before any process starts. No weights are read."""

import re
from pathlib import Path
from typing import Any

from rft_platform.algorithms.spec import LoraSpec
from rft_platform.cluster.this_process import NOT_FOR_TRANSFORMERS, importing
from rft_platform.common.errors import UserError


def check_trainable(folder: Path, longest: int | None, lora: LoraSpec | None = None) -> None:
    """Raise UserError if the model in ``folder`` cannot be trained on rows of ``longest`` tokens, or not with ``lora``.

    ``longest`` None means the model's whole context. The model is built without memory for its weights and passes the
    same checks as when it is loaded.
    """
    with importing(without=NOT_FOR_TRANSFORMERS):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

    from rft_platform.training.packed.model_support import check_window
    from rft_platform.training.packed.packed_policy import PackedPolicy

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises many error types for an unknown config.json
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder}: transformers cannot build a causal LM from its config.json: {reason}") from error
    if lora is not None:
        _check_adapter(model, folder, lora)
    PackedPolicy(model)
    check_window(model, longest)


def _check_adapter(model: Any, folder: Path, lora: LoraSpec) -> None:
    """Raise UserError if an adapter has a rank that no matrix of the model can have, or no layer of it."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    weights = {name: getattr(module, "weight", None) for name, module in model.named_modules()}
    layers = {name: weight for name, weight in weights.items() if weight is not None and weight.ndim == 2}
    most = max(min(weight.shape) for weight in layers.values())
    if lora.rank > most:
        raise UserError(
            f"lora_rank {lora.rank:,} of model.lora_configs: the matrices of {folder} have at most rank {most:,}; give "
            "a smaller one, such as 16"
        )
    modules = lora.target_modules
    if modules == "all-linear" or any(weight.ndim > 2 for weight in model.parameters()):
        return  # peft finds the parts of fused experts by the names that they had as layers
    config = LoraConfig(target_modules=modules if isinstance(modules, str) else list(modules))
    try:
        if any(check_target_module_exists(config, name) for name in layers):
            return
        reason = f"no layer of {folder} matches"
    except re.error as error:
        reason = f"no regular expression of Python: {error}"
    known = sorted({name.rpartition(".")[2] for name in layers})
    raise UserError(
        f"target_modules {modules!r} of model.lora_configs: {reason}; give all-linear, a regular expression for the "
        f"whole name of a layer, or names among {', '.join(known)}"
    )


def problems(folders: list[str], longest: int | None, lora: dict[str, Any] | None) -> list[str | None]:
    """The problem of each model folder, or None; ``lora`` has the fields of LoraSpec."""
    adapter = None if lora is None else LoraSpec(**lora)
    found: list[str | None] = []
    for folder in folders:
        try:
            check_trainable(Path(folder), longest, adapter)
        except UserError as error:
            found.append(str(error))
        else:
            found.append(None)
    return found
