"""The GPU memory that trainer and engine need, computed before a run starts, and the settings that fit.

``choose_memory`` fills in what the configuration leaves open. Where engine and trainer share a GPU, the engine's cache
comes first, because answers that wait for a place in it cost more than gradient checkpointing does: 512 answers of a 4B
model took 24 s with 90,000 tokens of cache and 14 s with 150,000. The trainer gets the fastest settings that fit beside
this cache, and the engine then gets what the trainer leaves. If the fastest settings do not fit, and engine and trainer
never work at the same time, they take turns: the engine sleeps while the trainer works, and a trainer without work
keeps only its state.

The trainer's part is the sum of what training keeps on each GPU: float32 weights, gradients and AdamW's two moments (16
bytes a parameter, divided by the ranks), frozen models in the dtype of the activations, gathered weights, the
activations of one pack, and the chunk of logits. Compared with four measurements of a 0.6B model on an H200
(``benchmarks/results/training_step_gpu.json``) it is within 3 %, and within 4 % of what 4B and 8B models used on H100s
(``benchmarks/results/round_gpu_4b.json``).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psutil import virtual_memory

from rft_platform.cluster.child import Program
from rft_platform.config.gpu_placement import engine_kind, place
from rft_platform.config.resolve import RunSettings

GIB = 2**30
_STATE_BYTES = 16  # of a trained parameter: float32 weight, gradient and two moments
_EAGER = 1.3  # activations without torch.compile, which keeps fewer intermediate tensors
_HEAD_BYTES = 2 * GIB  # chunk of logits and its gradient at the peak
_CONTEXT_BYTES = GIB  # CUDA context and libraries of a process
_NCCL_BYTES = GIB  # buffers of the communication between ranks
_RESERVED = 1.04  # what torch's allocator holds on a GPU, relative to what is in use
_ENGINE_BYTES = 2 * GIB  # the largest forward pass of an engine, within its share
_GRAPHS_BYTES = 2 * GIB  # CUDA graphs and context of an engine, beyond its share
_ADAPTER_GRAPHS_BYTES = 2 * GIB  # with adapters an engine has graphs for both kinds of batches: 3.1 to 3.4 GiB in all


_LARGEST_PACK, _FAST_PACK, _PACK_STEP = 32768, 8192, 1024  # tokens; smaller packs than _FAST_PACK cost throughput
_CPU_PACK = 16384
_HOST_FACTOR = 1.25  # host memory for an offloaded state, relative to its size
_USABLE = 0.97  # of a GPU's memory: the rest is lost to the driver and to fragmentation
_ALONE_SHARE, _LARGEST_SHARE, _UNKNOWN_SHARE = 0.9, 0.6, 0.4  # of a GPU, for an engine: alone; beside a trainer
_SMALLEST_CACHE = 65536  # tokens of running answers that an engine should hold


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """The settings that decide about the memory: the user's, or chosen by ``choose_memory``."""

    max_tokens_per_pack: int
    gradient_checkpointing: bool
    cpu_offload: bool
    engine_share: float  # of a GPU, for each engine of the policy
    engine_sleeps: bool = False  # engine and trainer of a GPU take turns


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
    def of(cls, model: str) -> "ModelShape | None":
        """The shape of a local model, or of a Hugging Face model whose configuration is in the cache; None: unknown."""
        if Path(model).is_dir() or model.startswith("models:/"):
            return cls.read(Path(model))
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            file = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return None
        return cls.read(Path(file).parent) if isinstance(file, str) else None

    @classmethod
    def read(cls, folder: Path) -> "ModelShape | None":
        """The shape of the model in ``folder``; None if it has no readable configuration.

        Without weights, as when only the configuration was fetched, the parameters are computed from the sizes.
        """
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            size = config.get("head_dim") or hidden // heads
            experts = config.get("num_experts_per_tok") or 0
            shape = cls(
                parameters=sum(map(_parameters, folder.glob("*.safetensors"))),
                layers=config["num_hidden_layers"],
                hidden=hidden,
                intermediate=experts * config.get("moe_intermediate_size", 0) or config["intermediate_size"],
                queries=heads * size,
                keys=(config.get("num_key_value_heads") or heads) * size,
                vocabulary=config["vocab_size"],
            )
            if shape.parameters or experts:
                return shape if shape.parameters else None
            embeddings = 1 if config.get("tie_word_embeddings") else 2
            layer = shape.hidden * (2 * shape.queries + 2 * shape.keys + 3 * shape.intermediate)
            return replace(shape, parameters=embeddings * shape.vocabulary * hidden + shape.layers * layer)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes of each trainer rank."""

    state: int  # weights, gradients, moments, and frozen models
    gathered: int  # weights of whole layers in the dtype of the activations
    activations: int  # of one pack
    head: int  # logits, and the gathered embedding with its gradient
    communication: int  # buffers for gradients on their way to other ranks
    kept: int  # what stays on the GPU between two trainings

    @property
    def in_use(self) -> int:
        """What tensors occupy at the peak."""
        return self.state + self.gathered + self.activations + self.head + self.communication

    @property
    def total(self) -> int:
        """What the process needs: tensors, free blocks between them, and its CUDA context."""
        return int(_RESERVED * self.in_use) + _CONTEXT_BYTES

    @property
    def at_rest(self) -> int:
        """What the process holds between two trainings, if it frees the rest."""
        return int(_RESERVED * self.kept) + _CONTEXT_BYTES


def trainer_memory(run: RunSettings, shape: ModelShape, choice: MemoryChoice) -> TrainerMemory:
    """What each trainer rank needs on its GPU."""
    trainer, size = run.config.trainer, 4 if run.config.trainer.dtype == "float32" else 2
    trained, frozen = 1 + (run.spec.critic is not None), int(run.algorithm.teacher)
    if run.lora is not None:  # the adapter is small
        trained, frozen = trained - 1, frozen + 1  # the base model is the reference, too
    elif run.algorithm.reference == "always" or run.spec.beta or run.spec.kl_penalty is not None:
        frozen += 1
    state = (_STATE_BYTES * trained + size * frozen) * shape.parameters
    state = 0 if choice.cpu_offload else state // trainer.nproc
    keeps_all = (
        trainer.nproc == 1 and trained
    )  # a single rank keeps what it gathers (``training.models.loading.shard``)
    gathered = shape.parameters if keeps_all else 2 * shape.parameters // shape.layers
    layer = 4 * shape.hidden + 3 * shape.queries + 4 * shape.keys + 3 * shape.intermediate  # values of a token
    kept = shape.layers * layer
    if choice.gradient_checkpointing:
        kept = shape.layers * shape.hidden + layer
    eager = 1.0 if trainer.torch_compile is not False and size == 2 else _EAGER
    embedding = shape.vocabulary * shape.hidden
    sent = embedding + 2 * shape.parameters // shape.layers  # gathered a second time, and the float32 gradient's copy
    gathered_bytes = gathered * size if size == 2 or trainer.nproc > 1 else 0
    nccl = _NCCL_BYTES if trainer.nproc > 1 else 0
    return TrainerMemory(
        state=state,
        gathered=gathered_bytes,
        activations=int(choice.max_tokens_per_pack * kept * size * eager),
        head=_HEAD_BYTES + embedding * (size + 4),
        communication=nccl + sent * (size + 4 // trainer.nproc) if nccl else 0,
        kept=state + nccl + (gathered_bytes if keeps_all else 0),
    )


def choose_memory(run: RunSettings, gpu_count: int, gpu_bytes: int | None) -> MemoryChoice:
    """The user's values, and for those left open values that fit a GPU of ``gpu_bytes``.

    If nothing fits, the values that need least memory; ``memory_problems`` then refuses the run.
    """
    trainer, explorer, placement = run.config.trainer, run.config.explorer, place(run.config, gpu_count)
    shape = ModelShape.of(run.config.model.model_path) if gpu_count and gpu_bytes is not None else None
    if shape is None or gpu_bytes is None:
        share = _UNKNOWN_SHARE if placement.shared else _ALONE_SHARE
        pack = trainer.max_token_len_per_gpu or _CPU_PACK
        return MemoryChoice(pack, bool(trainer.gradient_checkpointing), bool(trainer.cpu_offload), _share(run, share))
    usable = int(_USABLE * gpu_bytes)
    engines = list(_engine_sizes(run, shape, gpu_bytes)) if placement.shared and placement.engines else [0]

    def fits(beside: int, choice: MemoryChoice) -> bool:
        needed = trainer_memory(run, shape, choice)
        return needed.total <= usable - beside and needed.at_rest <= usable - engines[-1]

    awake = [(False, *each) for each in _choices(run, shape, usable, engines)]
    asleep = [(True, *each) for each in _choices(run, shape, usable, [_beyond_share(run)])]
    plans = [awake[0], *asleep, *awake]
    if not _takes_turns(run, gpu_count):
        plans = awake
    elif explorer.rollout_model.enable_sleep_mode:
        plans = asleep
    sleeps, _, choice = next((plan for plan in plans if fits(*plan[1:])), plans[-1])  # the last one needs least
    if not placement.shared:
        return replace(choice, engine_share=_share(run, _ALONE_SHARE))
    needed = trainer_memory(run, shape, choice)
    left = usable - (needed.at_rest if sleeps else needed.total) - _beyond_share(run)
    least = engines[-1] - _beyond_share(run)
    share = min(_ALONE_SHARE if sleeps else _LARGEST_SHARE, max(left, least) / gpu_bytes)
    return replace(choice, engine_share=_share(run, int(share * 100) / 100), engine_sleeps=sleeps)


def _takes_turns(run: RunSettings, gpu_count: int) -> bool:
    """Whether an engine may sleep while the trainer works: both share a GPU, and no process needs the engine then."""
    config, placement = run.config, place(run.config, gpu_count)
    together = config.online or config.synchronizer.dynamic or config.synchronizer.sync_offset or config.mode == "train"
    return (
        placement.shared
        and placement.engines > 0
        and not together
        and engine_kind(config, gpu_count) == "vllm"
        and config.explorer.rollout_model.enable_sleep_mode is not False
    )


def _choices(
    run: RunSettings, shape: ModelShape, usable: int, engines: Sequence[int]
) -> Iterator[tuple[int, MemoryChoice]]:
    """The possible settings, fastest first: bytes of the engine, and the trainer with the largest pack beside it."""
    trainer = run.config.trainer
    longest = -(-(run.config.model.max_model_len or 1) // _PACK_STEP) * _PACK_STEP
    given = trainer.gradient_checkpointing
    offloads = (False, True) if trainer.cpu_offload is None else (trainer.cpu_offload,)
    if trainer.cpu_offload is None and _HOST_FACTOR * _STATE_BYTES * shape.parameters > virtual_memory().total:
        offloads = (False,)
    modes = [
        (engine, offload, checkpointing, least)
        for offload in offloads
        for engine in engines
        for checkpointing, least in ((False, _FAST_PACK), (True, _FAST_PACK), (True, _PACK_STEP), (False, _PACK_STEP))
        if (checkpointing if given is None else given) == checkpointing
        and (given is False or checkpointing or least == _FAST_PACK)
    ]
    for engine, offload, checkpointing, least in modes:
        smallest = max(least, longest)
        choice = MemoryChoice(trainer.max_token_len_per_gpu or smallest, checkpointing, offload, 0.0)
        if trainer.max_token_len_per_gpu is None:
            needed = trainer_memory(run, shape, choice)
            left = (usable - engine - needed.total) / _RESERVED + needed.activations
            most = int(smallest * left / max(needed.activations, 1))
            largest = min(max(_LARGEST_PACK, longest), most // _PACK_STEP * _PACK_STEP)
            choice = replace(choice, max_tokens_per_pack=max(smallest, largest))
        yield engine, choice


def _share(run: RunSettings, of_all: float) -> float:
    """Share of each engine of the policy: the user's, or its part of ``of_all``."""
    given = run.config.explorer.rollout_model.gpu_memory_utilization
    return of_all / run.config.explorer.engines_per_gpu if given is None else given


def _engine_sizes(run: RunSettings, shape: ModelShape, gpu_bytes: int) -> Iterator[int]:
    """Bytes of a GPU for its engines: the user's share; or weights and a cache, first for all answers that run at once.

    An answer fills half of its context on average. Each further size has half of the cache, at least room for some
    answers.
    """
    explorer, longest = run.config.explorer, run.config.model.max_model_len or _SMALLEST_CACHE
    if explorer.rollout_model.gpu_memory_utilization is not None:
        yield _engine_bytes(run, gpu_bytes, explorer.rollout_model.gpu_memory_utilization) + _beyond_share(run)
        return
    weights = 2 * shape.parameters // explorer.rollout_model.tensor_parallel_size
    least = max(longest, min(64 * longest, _SMALLEST_CACHE))
    cache = max(least, explorer.runner_per_model * longest // 2)
    while True:
        used = weights + _ENGINE_BYTES + cache * _cache_bytes(run, shape)
        if cache == least or used <= _LARGEST_SHARE * gpu_bytes / explorer.engines_per_gpu:
            yield explorer.engines_per_gpu * used + _beyond_share(run)
        if cache == least:
            return
        cache = max(least, cache // 2)


def _beyond_share(run: RunSettings) -> int:
    """Bytes that the engines of a GPU use beyond their share."""
    graphs = _GRAPHS_BYTES + (_ADAPTER_GRAPHS_BYTES if run.lora is not None else 0)
    return graphs * run.config.explorer.engines_per_gpu


def memory_lines(run: RunSettings, gpu_count: int, gpu_bytes: int | None) -> list[str]:
    """The lines of the dry run: what each process needs on a GPU. Empty without a GPU or a known model."""
    shape = ModelShape.of(run.config.model.model_path) if gpu_count else None
    if shape is None:
        return []
    lines, config, choice = [], run.config, choose_memory(run, gpu_count, gpu_bytes)
    if _trains(run):
        needed, ranks = trainer_memory(run, shape, choice), config.trainer.nproc
        lines.append(
            f"trainer: {_gb(needed.total)} on each of {ranks} GPU(s): weights, gradients and optimiser "
            f"{_gb(needed.state)}, gathered weights {_gb(needed.gathered)}, activations of "
            f"{choice.max_tokens_per_pack:,} tokens {_gb(needed.activations)}, logits {_gb(needed.head)}"
        )
    if place(config, gpu_count).engines and gpu_bytes is not None:
        share = _engine_bytes(run, gpu_bytes, choice.engine_share)
        cache = share - 2 * shape.parameters // config.explorer.rollout_model.tensor_parallel_size - _ENGINE_BYTES
        lines.append(
            f"engine: {_gb(share)} of {_gb(gpu_bytes)} (gpu_memory_utilization), of which about {_gb(max(cache, 0))} "
            f"hold {max(cache, 0) // _cache_bytes(run, shape):,} tokens of running answers"
        )
    if gpu_bytes is not None and (chosen := _chosen(run, choice, gpu_count)):
        lines.append(f"chosen for this GPU: {', '.join(chosen)}")
    return lines


def _chosen(run: RunSettings, choice: MemoryChoice, gpu_count: int) -> list[str]:
    """The values that the configuration leaves open, with the reason where one slows training down."""
    trainer, serving = run.config.trainer, run.config.explorer.rollout_model
    chosen = []
    if _trains(run):
        if trainer.max_token_len_per_gpu is None:
            chosen.append(f"trainer.max_token_len_per_gpu {choice.max_tokens_per_pack}")
        if trainer.gradient_checkpointing is None:
            why = (
                f" (without it packs of {_FAST_PACK:,} tokens do not fit beside the engine)"
                if choice.gradient_checkpointing
                else ""
            )
            chosen.append(f"trainer.gradient_checkpointing {str(choice.gradient_checkpointing).lower()}{why}")
        if trainer.cpu_offload is None and choice.cpu_offload:
            chosen.append("trainer.cpu_offload true (the optimiser's state does not fit on the GPU)")
    if serving.gpu_memory_utilization is None and place(run.config, gpu_count).engines:
        chosen.append(f"explorer.rollout_model.gpu_memory_utilization {choice.engine_share:g}")
    if serving.enable_sleep_mode is None and choice.engine_sleeps:
        chosen.append("explorer.rollout_model.enable_sleep_mode true (engine and trainer take turns on the GPU)")
    return chosen


def memory_problems(run: RunSettings, gpu_count: int, gpu_bytes: int | None) -> Iterator[str]:
    """One line for each process that does not fit on a GPU of ``gpu_bytes``; nothing if that is unknown."""
    shape = ModelShape.of(run.config.model.model_path) if gpu_count and gpu_bytes is not None else None
    if gpu_bytes is None or shape is None:
        return
    config, placement, choice = run.config, place(run.config, gpu_count), choose_memory(run, gpu_count, gpu_bytes)
    serving, engine = config.explorer.rollout_model, 0
    if placement.engines:
        share = _engine_bytes(run, gpu_bytes, choice.engine_share)
        engine = share + _beyond_share(run)
        weights = 2 * shape.parameters // serving.tensor_parallel_size
        longest = config.model.max_model_len or 0
        if weights + _ENGINE_BYTES + longest * _cache_bytes(run, shape) > share:
            yield (
                f"explorer.rollout_model.gpu_memory_utilization {choice.engine_share:g} gives an engine {_gb(share)}, "
                f"and {_gb(weights)} of weights with one answer of {longest:,} tokens do not fit: raise it, or raise "
                "tensor_parallel_size"
            )
    if serving.enable_sleep_mode and not choice.engine_sleeps:
        yield (
            "explorer.rollout_model.enable_sleep_mode true: the engine cannot sleep here, because it shares no GPU "
            "with the trainer, works at the same time (synchronizer.sync_offset, a dynamic sync style, online "
            "projects), or is not vLLM; leave the key out"
        )
    if not _trains(run):
        return
    needed = trainer_memory(run, shape, choice)
    if choice.engine_sleeps:
        if needed.at_rest + engine > gpu_bytes:
            yield (
                f"explorer.rollout_model.gpu_memory_utilization {choice.engine_share:g}: the engine's {_gb(engine)} "
                f"and the {_gb(needed.at_rest)} that the trainer keeps between two rounds do not fit on a GPU of "
                f"{_gb(gpu_bytes)}: lower it, or leave it out"
            )
        engine = _beyond_share(run)
    room = gpu_bytes - (engine if placement.shared else 0)
    if needed.total <= room:
        return
    beside = f" beside the engine's {_gb(engine)}" if placement.shared and engine else ""
    yield (
        f"trainer: needs about {_gb(needed.total)} on a GPU of {_gb(gpu_bytes)}{beside} (weights, gradients and "
        f"optimiser {_gb(needed.state)}, activations {_gb(needed.activations)}, logits {_gb(needed.head)}): "
        f"{_remedy(run, choice, needed, room, bool(beside))}"
    )


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this machine; None if nvidia-smi does not say it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return min(int(line) for line in Program(command, wall_s=20).run().stdout.split()) * 2**20
    except (OSError, ValueError):
        return None


def _remedy(run: RunSettings, choice: MemoryChoice, needed: TrainerMemory, room: int, shared: bool) -> str:
    ways = []
    rest = needed.total - int(_RESERVED * needed.activations)
    if rest < room and choice.max_tokens_per_pack > _PACK_STEP:
        left = (room - rest) / _RESERVED
        fitting = int(choice.max_tokens_per_pack * left / needed.activations) // _PACK_STEP * _PACK_STEP
        if fitting >= (run.config.model.max_model_len or 1):
            ways.append(f"set trainer.max_token_len_per_gpu to {fitting} or less, or leave it out")
    if not choice.gradient_checkpointing:
        ways.append("leave out trainer.gradient_checkpointing, or set it to true")
    if shared and run.config.explorer.rollout_model.gpu_memory_utilization is not None:
        ways.append("lower explorer.rollout_model.gpu_memory_utilization, or leave it out")
    if needed.state > room // 2:
        ways.append("raise trainer.nproc, set trainer.cpu_offload to true, or train an adapter (model.lora_configs)")
    return "; or ".join(ways) or "use a GPU with more memory"


def _trains(run: RunSettings) -> bool:
    return run.config.mode in ("both", "train", "colocate") or run.config.online


def _engine_bytes(run: RunSettings, gpu: int, share: float) -> int:
    """Memory of a GPU within the shares of its engines."""
    return int(gpu * share) * run.config.explorer.engines_per_gpu


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
