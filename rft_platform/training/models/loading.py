"""Load a policy from a Hugging Face folder; prepare its layers (checkpointing, compilation) and shard them.

``torch.compile`` pays off if shapes repeat: packs then have one of few static lengths (``packing.StaticLengths``), and
a layer is compiled once per length. Attention is a graph break (``attention``).

FSDP2 costs about 17 ms a step for a model of any size (measured on a 1M-parameter model, one gloo rank: 10 % of a step
of 64 rows). A model on a single rank that computes in the dtype of its parameters is therefore not sharded.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rft_platform.algorithms.spec import LoraSpec
from rft_platform.common.digests import defers_state
from rft_platform.common.errors import UserError, some
from rft_platform.training.distributed import Ranks
from rft_platform.training.models.shards import MASTER, TRAINER_STATE, ShardReader
from rft_platform.training.packed.packed_policy import PackedModel, PackedPolicy
from rft_platform.training.packed.packing import StaticLengths

#: Limit of compiled variants of a layer: number of lengths x 2 (training, scoring) x models of one class, with margin.
COMPILED_VARIANTS = 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations and published weights; ``auto``: bfloat16 on CUDA, float32 elsewhere."""
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
    trained: bool = True,
    seed: int = 0,
    resumed: bool = False,
) -> PackedPolicy:
    """Load the causal LM of ``folder`` on every rank, with activations of ``dtype``.

    Trained weights are float32. Frozen weights, of a model that is not ``trained`` or has an adapter, are of ``dtype``:
    the activations are the same, because float32 weights are rounded to ``dtype`` before use.

    If ``folder`` is a checkpoint of the platform, its master weights replace the published, rounded weights. ``lora``
    adds a new adapter, initialised from ``seed``; ``adapter`` is the folder of a saved adapter. With an adapter, only
    the adapter is trainable. If the checkpoint's state is saved later, its master weights are read only if ``resumed``:
    otherwise the result would depend on whether they are already saved.
    """
    with_adapter = lora is not None or adapter is not None
    frozen = with_adapter or not trained
    model = _read(folder, dtype if frozen else torch.float32)
    if with_adapter:
        _read_master(model, folder, resumed)
        model = _with_adapter(model, folder, lora, adapter, seed)
    model.to(ranks.device)
    own_memory(model)
    model.eval()  # no dropout: it would add noise to the importance ratio
    policy = PackedPolicy(model, compute_dtype=dtype)
    policy.runs_on = ranks.device
    prepare_policy(policy, policy.causal, ranks, dtype)
    alone = ranks.world_size == 1  # gathered weights then are copies in ``dtype``
    if is_sharded(ranks, dtype):
        policy.reduces_once = ranks.layout.reduce_once and (trained or with_adapter)
        shard(policy, policy.layers, ranks, dtype, keep_gathered=policy.reduces_once or (alone and not frozen))
    if not with_adapter:
        _read_master(model, folder, resumed)  # each rank reads its part
    check_tied(policy.causal, folder)
    return policy


def check_tied(model: Any, folder: Path) -> None:
    """Raise UserError if the configuration ties embedding and LM head, but the loaded model has two tensors."""
    tied = model.config.get_text_config().tie_word_embeddings
    if tied and model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        raise UserError(f"{folder}: config.json ties embedding and LM head, but the loaded model has two tensors")


def _read(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: expected a Hugging Face model folder, but there is no config.json in it")
    try:
        if _has_master(folder) and not any(folder.glob("*.safetensors")):
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder}: transformers cannot load a causal LM from it: {error}") from error
    random = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if random:
        raise UserError(
            f"{folder}: its safetensors files lack {some(random)} in the shape that config.json implies, so these "
            "weights would be random: restore the files, or use a folder with all weights of the model"
        )
    return model


def _read_master(model: nn.Module, folder: Path, resumed: bool) -> None:
    """Replace the weights by the float32 weights of a platform checkpoint, if the checkpoint has them."""
    if _has_master(folder) and (resumed or not defers_state(folder)):
        with torch.no_grad():
            ShardReader(folder / TRAINER_STATE).read(master_weights(model))


def _has_master(folder: Path) -> bool:
    return any((folder / TRAINER_STATE).glob(f"{MASTER}*.safetensors"))


def master_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, as they are on this rank (DTensors if sharded).

    A shared tensor is returned once.
    """
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | buffers


def _with_adapter(model: Any, folder: Path, lora: LoraSpec | None, adapter: Path | None, seed: int) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True, local_files_only=True)
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


def prepare_policy(policy: PackedModel, model: Any, ranks: Ranks, dtype: torch.dtype) -> None:
    """Prepare the layers of ``policy``, which wraps ``model``: checkpointing and compilation. Call it before sharding.

    The packs get static lengths if the layers or the CUDA attention kernels are compiled.
    """
    on_cuda, layout = ranks.device.type == "cuda", ranks.layout
    compiled = layout.compiles(ranks.device.type, float32=dtype == torch.float32)
    policy.static = StaticLengths() if compiled or (on_cuda and dtype != torch.float32) else None
    prepare_layers(model, policy.layers, checkpointing=layout.gradient_checkpointing, compiled=compiled)


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
    """Turn on gradient checkpointing of each layer. Only the layer itself is in training mode: dropouts stay off."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(f"a {type(model).__name__} has no gradient checkpointing in transformers: turn it off")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


def _compile(layers: nn.ModuleList) -> None:
    """Compile the forward pass of each layer, without its hooks: FSDP's hooks gather weights and must run uncompiled.

    Exceeding the recompilation limit is an error, because torch's fallback is slow and gives no warning.
    """
    torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)


def compiled_graphs() -> int:
    """Number of graphs that torch.compile has made in this process. It should not grow after the first step."""
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))


def is_sharded(ranks: Ranks, dtype: torch.dtype) -> bool:
    """Whether FSDP is used. One rank in float32 without offload has nothing to shard, offload or round."""
    return ranks.world_size > 1 or dtype != torch.float32 or ranks.layout.cpu_offload


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    ranks: Ranks,
    dtype: torch.dtype,
    in_float32: Iterable[nn.Module] = (),
    *,
    keep_gathered: bool,
) -> None:
    """Shard ``model`` over the ranks, layer by layer.

    The model computes in ``dtype``, except for the modules of ``in_float32``, which compute in float32. With
    ``keep_gathered``, the gathered copy of a layer, in ``dtype``, is kept from the forward to the backward pass: the
    layer is gathered once instead of twice, and the copies of all layers are in memory at the same time.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh, layout = ranks.mesh(), ranks.layout
    offload = CPUOffloadPolicy() if layout.cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=DTYPES[layout.reduce_dtype])
    for part in in_float32:
        fully_shard(part, mesh=mesh, offload_policy=offload)
    free = not keep_gathered
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
