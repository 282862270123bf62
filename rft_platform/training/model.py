"""Loading a policy: Hugging Face folder in, packed and sharded model out.

Sharding with FSDP2 costs about 17 ms a step whatever the model's size (measured on a 1M-parameter model, one gloo
rank: 10 % of a step of 64 rows), so a single rank that computes in its parameters' own format is left unsharded.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rft_platform.errors import UserError
from rft_platform.training.logprobs import PackedPolicy
from rft_platform.training.manifest import TRAINER_STATE
from rft_platform.training.protocol import LoraSpec
from rft_platform.training.ranks import Ranks

MASTER = "master.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Format of activations and published weights; ``auto`` is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def load_policy(
    folder: Path,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    lora: LoraSpec | None = None,
    adapter: Path | None = None,
    seed: int = 0,
) -> PackedPolicy:
    """The causal LM of ``folder`` on every rank, with float32 master weights and activations of ``dtype``.

    The master weights of a checkpoint of ours replace its published, rounded ones. ``lora`` adds a new adapter (drawn
    from ``seed``), ``adapter`` loads one from its folder; then only the adapter is trainable.
    """
    model = _read(folder)
    master = folder / TRAINER_STATE / MASTER
    if master.exists():
        _load_master(model, master)
    if lora is not None or adapter is not None:
        model = _with_adapter(model, folder, lora, adapter, seed)
    model.to(ranks.device)
    model.eval()  # no dropout: the importance ratio would be noise
    policy = PackedPolicy(model, compute_dtype=dtype)
    if ranks.world_size > 1 or dtype != torch.float32:
        _shard(policy, ranks, dtype)
    check_tied(policy.causal, folder)
    return policy


def check_tied(model: Any, folder: Path) -> None:
    """UserError where a model that shares embedding and LM head by its configuration does not do so in memory."""
    tied = model.config.get_text_config().tie_word_embeddings
    if tied and model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        raise UserError(f"{folder}: config.json ties embedding and LM head, but the loaded model has two tensors")


def _read(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: expected a Hugging Face model folder, but there is no config.json in it")
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: transformers cannot load a causal LM from it: {error}") from error


def _load_master(model: nn.Module, file: Path) -> None:
    from safetensors.torch import load_file

    missing, unexpected = model.load_state_dict(load_file(file), strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise UserError(f"{file}: its tensors are not those of the model beside it: {unexpected or missing}")


def _with_adapter(model: Any, folder: Path, lora: LoraSpec | None, adapter: Path | None, seed: int) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)
    assert lora is not None
    modules = lora.target_modules
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise UserError(f"LoRA cannot be added to {folder}: {error}") from error


def _shard(policy: PackedPolicy, ranks: Ranks, dtype: torch.dtype) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = ranks.mesh()
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
