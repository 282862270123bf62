"""The GPU memory that trainer and engine need, computed before a run starts.

The trainer's part is the sum of what training keeps on each GPU: float32 weights, gradients and AdamW's two moments (16
bytes a parameter, divided by the ranks), frozen models in the dtype of the activations, gathered weights, the
activations of one pack, and the chunk of logits. Compared with four measurements of a 0.6B model on an H200
(``benchmarks/results/training_step_gpu.json``) it is within 3 %.
"""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_platform.config.gpu_placement import place
from rft_platform.config.resolve import RunSettings

GIB = 2**30
_STATE_BYTES = 16  # of a trained parameter: float32 weight, gradient and two moments
_EAGER = 1.3  # activations without torch.compile, which keeps fewer intermediate tensors
_HEAD_BYTES = 2 * GIB  # chunk of logits and its gradient at the peak
_CONTEXT_BYTES = GIB  # CUDA context and libraries of a process
_ENGINE_BYTES = 2 * GIB  # the largest forward pass of an engine, within its share
_GRAPHS_BYTES = 2 * GIB  # CUDA graphs and context of an engine, beyond its share
_ADAPTER_GRAPHS_BYTES = 2 * GIB  # with adapters an engine has graphs for both kinds of batches: 3.1 to 3.4 GiB in all


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, as its folder gives them."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    queries: int  # heads * head size
    keys: int  # key-value heads * head size
    vocabulary: int

    @classmethod
    def read(cls, folder: Path) -> "ModelShape | None":
        """The shape of the model in ``folder``; None if it is not a local folder of safetensors."""
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            size = config.get("head_dim") or hidden // heads
            experts = config.get("num_experts_per_tok") or 0
            return cls(
                parameters=sum(map(_parameters, folder.glob("*.safetensors"))),
                layers=config["num_hidden_layers"],
                hidden=hidden,
                intermediate=experts * config.get("moe_intermediate_size", 0) or config["intermediate_size"],
                queries=heads * size,
                keys=(config.get("num_key_value_heads") or heads) * size,
                vocabulary=config["vocab_size"],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes of each trainer rank."""

    state: int  # weights, gradients, moments, and frozen models
    gathered: int  # weights of whole layers in the dtype of the activations
    activations: int  # of one pack
    head: int  # logits, and the gathered embedding with its gradient

    @property
    def total(self) -> int:
        """All of it, with the process's CUDA context."""
        return self.state + self.gathered + self.activations + self.head + _CONTEXT_BYTES


def trainer_memory(run: RunSettings, shape: ModelShape) -> TrainerMemory:
    """What each trainer rank needs on its GPU."""
    trainer, size = run.config.trainer, 4 if run.config.trainer.dtype == "float32" else 2
    trained, frozen = 1 + (run.spec.critic is not None), int(run.algorithm.teacher)
    if run.lora is not None:  # the adapter is small
        trained, frozen = trained - 1, frozen + 1  # the base model is the reference, too
    elif run.algorithm.reference == "always" or run.spec.beta or run.spec.kl_penalty is not None:
        frozen += 1
    state = (_STATE_BYTES * trained + size * frozen) * shape.parameters
    state = 0 if trainer.cpu_offload else state // trainer.nproc
    keeps_all = (
        trainer.nproc == 1 and trained
    )  # a single rank keeps what it gathers (``training.models.loading.shard``)
    gathered = shape.parameters if keeps_all else 2 * shape.parameters // shape.layers
    layer = 4 * shape.hidden + 3 * shape.queries + 4 * shape.keys + 3 * shape.intermediate  # values of a token
    kept = shape.layers * layer
    if trainer.gradient_checkpointing:
        kept = shape.layers * shape.hidden + layer
    eager = 1.0 if trainer.torch_compile is not False and size == 2 else _EAGER
    embedding = shape.vocabulary * shape.hidden * (size + 4)
    return TrainerMemory(
        state=state,
        gathered=gathered * size if size == 2 or trainer.nproc > 1 else 0,
        activations=int(trainer.max_token_len_per_gpu * kept * size * eager),
        head=_HEAD_BYTES + embedding,
    )


def memory_lines(run: RunSettings, gpu_count: int, gpu_bytes: int | None) -> list[str]:
    """The lines of the dry run: what each process needs on a GPU. Empty without a GPU or a local model."""
    shape = ModelShape.read(Path(run.config.model.model_path))
    if not gpu_count or shape is None:
        return []
    lines, config = [], run.config
    if _trains(run):
        needed, ranks = trainer_memory(run, shape), config.trainer.nproc
        lines.append(
            f"trainer: {_gb(needed.total)} on each of {ranks} GPU(s): weights, gradients and optimiser "
            f"{_gb(needed.state)}, activations of {config.trainer.max_token_len_per_gpu:,} tokens "
            f"{_gb(needed.activations)}, logits {_gb(needed.head)}"
        )
    if place(config, gpu_count).engines and gpu_bytes is not None:
        share = _engine_bytes(run, gpu_bytes)
        cache = share - 2 * shape.parameters // config.explorer.rollout_model.tensor_parallel_size - _ENGINE_BYTES
        lines.append(
            f"engine: {_gb(share)} of {_gb(gpu_bytes)} (gpu_memory_utilization), of which about {_gb(max(cache, 0))} "
            f"hold {max(cache, 0) // _cache_bytes(run, shape):,} tokens of running answers"
        )
    return lines


def memory_problems(run: RunSettings, gpu_count: int, gpu_bytes: int | None) -> Iterator[str]:
    """One line for each process that does not fit on a GPU of ``gpu_bytes``; nothing if that is unknown."""
    shape = ModelShape.read(Path(run.config.model.model_path))
    if not gpu_count or gpu_bytes is None or shape is None:
        return
    config, placement = run.config, place(run.config, gpu_count)
    serving, engine = config.explorer.rollout_model, 0
    if placement.engines:
        engine = _engine_bytes(run, gpu_bytes)
        weights = 2 * shape.parameters // serving.tensor_parallel_size
        longest = config.model.max_model_len or 0
        if weights + _ENGINE_BYTES + longest * _cache_bytes(run, shape) > engine:
            yield (
                f"explorer.rollout_model.gpu_memory_utilization {serving.gpu_memory_utilization:g} gives an engine "
                f"{_gb(engine)}, and {_gb(weights)} of weights with one answer of {longest:,} tokens do not fit: raise "
                "it, or raise tensor_parallel_size"
            )
    if not _trains(run):
        return
    if engine:
        engine += config.explorer.engines_per_gpu * (_GRAPHS_BYTES + (_ADAPTER_GRAPHS_BYTES if run.lora else 0))
    needed, room = trainer_memory(run, shape), gpu_bytes - (engine if placement.shared else 0)
    if needed.total <= room:
        return
    beside = f" beside the engine's {_gb(engine)}" if placement.shared and engine else ""
    yield (
        f"trainer: needs about {_gb(needed.total)} on a GPU of {_gb(gpu_bytes)}{beside} (weights, gradients and "
        f"optimiser {_gb(needed.state)}, activations {_gb(needed.activations)}, logits {_gb(needed.head)}): "
        f"{_remedy(run, needed, room, bool(beside))}"
    )


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this machine; None if nvidia-smi does not say it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.split()
        return min(int(line) for line in found) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _remedy(run: RunSettings, needed: TrainerMemory, room: int, shared: bool) -> str:
    trainer = run.config.trainer
    ways = []
    rest = needed.total - needed.activations
    if rest < room and trainer.max_token_len_per_gpu > 1024:
        fitting = int(trainer.max_token_len_per_gpu * (room - rest) / needed.activations) // 1024 * 1024
        if fitting >= (run.config.model.max_model_len or 1):
            ways.append(f"set trainer.max_token_len_per_gpu to {fitting} or less")
    if not trainer.gradient_checkpointing:
        ways.append("set trainer.gradient_checkpointing to true")
    if shared:
        ways.append("lower explorer.rollout_model.gpu_memory_utilization")
    if needed.state > room // 2:
        ways.append("raise trainer.nproc, set trainer.cpu_offload to true, or train an adapter (model.lora_configs)")
    return "; or ".join(ways) or "use a GPU with more memory"


def _trains(run: RunSettings) -> bool:
    return run.config.mode in ("both", "train", "colocate") or run.config.online


def _engine_bytes(run: RunSettings, gpu: int) -> int:
    """Memory of a GPU that its engines take."""
    explorer = run.config.explorer
    return int(gpu * explorer.rollout_model.gpu_memory_utilization) * explorer.engines_per_gpu


def _cache_bytes(run: RunSettings, shape: ModelShape) -> int:
    """Bytes of the key-value cache for one token on one GPU, in 16 bits."""
    return max(1, 4 * shape.layers * shape.keys // run.config.explorer.rollout_model.tensor_parallel_size)


def _parameters(file: Path) -> int:
    """Number of values in a safetensors file, from its header: its length in 8 bytes, then JSON."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        count = 1
        for size in tensor["shape"]:
            count *= size
        total += count
    return total


def _gb(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
