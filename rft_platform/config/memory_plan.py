"""The GPU memory that trainer and engine need, computed before a run starts, and the settings that fit.

``choose_memory`` fills in what the configuration leaves open. Where engine and trainer share a GPU, the engine's cache
comes first, because answers that wait for a place in it cost more than gradient checkpointing does: 512 answers of a 4B
model took 24 s with 90,000 tokens of cache and 14 s with 150,000. The trainer gets the fastest settings that fit beside
this cache, and the engine then gets what the trainer leaves. If the fastest settings do not fit, and engine and trainer
never work at the same time, they take turns: the engine sleeps while the trainer works, and a trainer without work
keeps only its state. Weights are gathered and gradients summed over the ranks once a step if that fits with packs of
half of the tokens or more: the ranks then wait for each other in the first and the last pack of a step, not in each.
One rank saves copies so, and needs no more memory.

``gpu_models`` names the models on the GPUs, each with its own shape. The trainer's part is the sum of what training
keeps on each GPU: float32 weights, gradients and AdamW's two moments (16 bytes a parameter, divided by the ranks of all
nodes), frozen models in the dtype of the activations, gathered weights, the activations of one pack, and the chunk of
logits. One model computes at a time: the activations are those of the model that needs most. Each rank loads a whole
model before it keeps its part of it, and this can need more than training does. Compared with four measurements of a
0.6B model on an H200 (``benchmarks/results/training_step_gpu.json``) it is within 3 %, and within 4 % of what 4B and 8B
models used on H100s (``benchmarks/results/round_gpu_4b.json``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from psutil import virtual_memory

from rft_platform.cluster.child import Program
from rft_platform.config.gpu_models import POLICY_SHARE, EngineModel, GpuModels, TrainerModel, gpu_models
from rft_platform.config.gpu_placement import engine_kind, place, visible_gpus
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
    reduce_once: bool = False  # trainer ranks gather weights and sum gradients once a step (``protocol.Layout``)


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes of each trainer rank."""

    state: int  # weights, gradients, moments, and frozen models
    gathered: int  # weights of whole layers in the dtype of the activations
    activations: int  # of one pack
    head: int  # logits, and the gathered embedding with its gradient
    communication: int  # gradients on their way to other ranks
    kept: int  # what stays on the GPU between two trainings
    loaded: int  # while a whole model is read: its weights, a copy of the largest tensor, and the other models

    @property
    def in_use(self) -> int:
        """What tensors occupy at the peak."""
        return self.state + self.gathered + self.activations + self.head + self.communication

    @property
    def total(self) -> int:
        """What the process needs while it trains or loads a model."""
        return max(self.training, self.loading)

    @property
    def training(self) -> int:
        """What training needs: tensors, free blocks between them, and the CUDA context."""
        return int(_RESERVED * self.in_use) + _CONTEXT_BYTES

    @property
    def loading(self) -> int:
        """What the process needs until the ranks have divided the model that they read."""
        return self.loaded + _CONTEXT_BYTES

    @property
    def at_rest(self) -> int:
        """What the process holds between two trainings, if it frees the rest."""
        return int(_RESERVED * self.kept) + _CONTEXT_BYTES


def trainer_memory(run: RunSettings, models: Sequence[TrainerModel], choice: MemoryChoice) -> TrainerMemory:
    """What each trainer rank needs on its GPU while it trains the policy that comes first in ``models``."""
    parts = [_model_memory(run, model, choice) for model in models]
    working = max(parts, key=lambda part: part.in_use - part.kept)
    state, kept = sum(part.state for part in parts), sum(part.kept for part in parts)
    nccl = _NCCL_BYTES if _ranks(run) > 1 else 0
    return replace(
        working,
        state=state,
        gathered=working.gathered + (kept - state) - (working.kept - working.state),
        communication=working.communication + nccl,
        kept=kept + nccl,
        loaded=max(part.loaded + state - part.state for part in parts),
    )


def _ranks(run: RunSettings) -> int:
    """Trainer ranks on all nodes."""
    return run.config.trainer.nproc * run.config.trainer_nodes


def _model_memory(run: RunSettings, model: TrainerModel, choice: MemoryChoice) -> TrainerMemory:
    """The part of one model, without what all models share."""
    trainer, shape, ranks = run.config.trainer, model.shape, _ranks(run)
    size = 4 if trainer.dtype == "float32" else 2
    state = 0 if choice.cpu_offload else _state_bytes(run, model) // ranks
    keeps_all = ranks == 1 and model.trained  # a single rank keeps what it gathers (``training.models.loading.shard``)
    once = choice.reduce_once and (model.trained or model.adapter > 0)
    gathered = shape.parameters if keeps_all or once else 2 * shape.parameters // shape.layers
    gathered_bytes = gathered * size if size == 2 or ranks > 1 else 0
    eager = 1.0 if trainer.torch_compile is not False and size == 2 else _EAGER
    sent = shape.embedding + 2 * shape.parameters // shape.layers  # gathered again, and the float32 gradient's copy
    summed = (shape.parameters if model.trained else 0) + model.adapter if once else 0
    weights = shape.parameters * (4 if model.trained else size) + 4 * model.adapter
    return TrainerMemory(
        state=state,
        gathered=gathered_bytes,
        activations=int(choice.max_tokens_per_pack * _kept_values(model, choice) * size * eager),
        head=_HEAD_BYTES + shape.embedding * (size + 4),
        communication=sent * (size + 4 // ranks) + 4 * summed * (ranks - 1) // ranks if ranks > 1 else 0,
        kept=state + (gathered_bytes if keeps_all else 0),
        loaded=weights + shape.embedding * (4 if model.trained else size),  # a copy of one tensor at a time
    )


def _state_bytes(run: RunSettings, model: TrainerModel) -> int:
    """Bytes of a model's weights on all ranks, with gradients and moments of what is trained."""
    size = 4 if run.config.trainer.dtype == "float32" else 2
    return (_STATE_BYTES if model.trained else size) * model.shape.parameters + _STATE_BYTES * model.adapter


def _kept_values(model: TrainerModel, choice: MemoryChoice) -> int:
    """Values of a token that a model keeps for its backward pass; those of one layer if it has none."""
    shape = model.shape
    layer = 4 * shape.hidden + 3 * shape.queries + 4 * shape.keys + 3 * shape.intermediate + model.adapter_values
    if not (model.trained or model.adapter):
        return layer
    return shape.layers * shape.hidden + layer if choice.gradient_checkpointing else shape.layers * layer


def _most_needed(run: RunSettings, on_gpus: GpuModels, choice: MemoryChoice) -> TrainerMemory:
    """What a trainer rank needs for the policy that needs most."""
    return max((trainer_memory(run, models, choice) for models in on_gpus.trainings), key=lambda each: each.total)


def choose_memory(run: RunSettings, gpu_count: int, gpu_bytes: int | None) -> MemoryChoice:
    """The user's values, and for those left open values that fit a GPU of ``gpu_bytes``.

    If nothing fits, the values that need least memory; ``memory_problems`` then refuses the run.
    """
    trainer, explorer, placement = run.config.trainer, run.config.explorer, place(run.config, gpu_count)
    on_gpus = gpu_models(run, gpu_count) if gpu_count and gpu_bytes is not None else None
    if on_gpus is None or gpu_bytes is None:
        share = _UNKNOWN_SHARE if placement.shared else _ALONE_SHARE
        pack = trainer.max_token_len_per_gpu or _CPU_PACK
        return MemoryChoice(pack, bool(trainer.gradient_checkpointing), bool(trainer.cpu_offload), _share(run, share))
    usable = int(_USABLE * gpu_bytes)
    engines = list(_engine_sizes(run, on_gpus, gpu_bytes)) if placement.shared and placement.engines else [0]

    def fits(beside: int, choice: MemoryChoice) -> bool:
        needed = _most_needed(run, on_gpus, choice)
        return needed.total <= usable - beside and needed.at_rest <= usable - engines[-1]

    awake = [(False, *each) for each in _choices(run, on_gpus, usable, engines)]
    asleep = [(True, *each) for each in _choices(run, on_gpus, usable, [_beyond_share(run)])]
    fastest = awake[: 1 + awake[0][2].reduce_once]  # it saves less than taking turns costs
    plans = [*fastest, *asleep, *awake]
    if not _takes_turns(run, gpu_count):
        plans = awake
    elif explorer.rollout_model.enable_sleep_mode:
        plans = asleep
    sleeps, _, choice = next((plan for plan in plans if fits(*plan[1:])), plans[-1])  # the last one needs least
    if not placement.shared:
        return replace(choice, engine_share=_share(run, _ALONE_SHARE))
    needed = _most_needed(run, on_gpus, choice)
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
    run: RunSettings, on_gpus: GpuModels, usable: int, engines: Sequence[int]
) -> Iterator[tuple[int, MemoryChoice]]:
    """The possible settings, fastest first: bytes of the engine, and the trainer with the largest pack beside it."""
    trainer = run.config.trainer
    longest = -(-(run.config.model.max_model_len or 1) // _PACK_STEP) * _PACK_STEP
    given = trainer.gradient_checkpointing
    offloads = (False, True) if trainer.cpu_offload is None else (trainer.cpu_offload,)
    if trainer.cpu_offload is None and _HOST_FACTOR * _host_bytes(run, on_gpus) > virtual_memory().total:
        offloads = (False,)
    modes = [
        (engine, least, MemoryChoice(0, checkpointing, offload, 0.0))
        for offload in offloads
        for engine in engines
        for checkpointing, least in ((False, _FAST_PACK), (True, _FAST_PACK), (True, _PACK_STEP), (False, _PACK_STEP))
        if (checkpointing if given is None else given) == checkpointing
        and (given is False or checkpointing or least == _FAST_PACK)
    ]
    # A rank adds up its gradients in ``reduce_dtype``. With one rank, an adapter gains less than a larger pack does.
    gains = trainer.reduce_dtype == "float32" and (_ranks(run) > 1 or run.lora is None)
    for engine, least, mode in modes:
        smallest = replace(mode, max_tokens_per_pack=trainer.max_token_len_per_gpu or max(least, longest))
        choice, once = smallest, replace(smallest, reduce_once=True)
        if trainer.max_token_len_per_gpu is None:
            choice = _with_largest_pack(run, on_gpus, smallest, usable - engine)
            half = max(smallest.max_tokens_per_pack, choice.max_tokens_per_pack // 2 // _PACK_STEP * _PACK_STEP)
            once = _with_largest_pack(run, on_gpus, replace(once, max_tokens_per_pack=half), usable - engine)
        if gains and not mode.cpu_offload:
            yield engine, once
        yield engine, choice


def _with_largest_pack(run: RunSettings, on_gpus: GpuModels, smallest: MemoryChoice, room: int) -> MemoryChoice:
    """``smallest`` with the largest pack with which the trainer fits in ``room`` bytes; unchanged if none fits."""
    least = smallest.max_tokens_per_pack
    for pack in range(max(_LARGEST_PACK, least), least, -_PACK_STEP):
        choice = replace(smallest, max_tokens_per_pack=pack)
        if _most_needed(run, on_gpus, choice).total <= room:
            return choice
    return smallest


def _host_bytes(run: RunSettings, on_gpus: GpuModels) -> int:
    """Bytes of the offloaded models in the memory of one node."""
    states = (sum(_state_bytes(run, model) for model in models) for models in on_gpus.trainings)
    return max(states) // run.config.trainer_nodes


def _share(run: RunSettings, of_all: float) -> float:
    """Share of each engine of the policy: the user's, or its part of ``of_all``."""
    given = run.config.explorer.rollout_model.gpu_memory_utilization
    return of_all / run.config.explorer.engines_per_gpu if given is None else given


def _engine_sizes(run: RunSettings, on_gpus: GpuModels, gpu_bytes: int) -> Iterator[int]:
    """Bytes of a GPU for its engines: the user's share; or weights and a cache, first for all answers that run at once.

    An answer fills half of its context on average. Each further size has half of the cache, at least room for some
    answers. The size is that of the engine that needs most.
    """
    explorer, longest = run.config.explorer, run.config.model.max_model_len or _SMALLEST_CACHE
    beyond, open_ones = _beyond_share(run), [engine for engine in on_gpus.engines if engine.share is None]
    given = max((int(gpu_bytes * each.share) * each.a_gpu for each in on_gpus.engines if each.share), default=0)
    if explorer.rollout_model.gpu_memory_utilization is not None:
        yield given + beyond
        return
    least = max(longest, min(64 * longest, _SMALLEST_CACHE))
    cache = max(least, explorer.runner_per_model * longest // 2)
    while True:
        used = max(
            each.weights + _ENGINE_BYTES + max(cache, each.longest or 0) * each.cache_bytes for each in open_ones
        )
        if cache == least or used <= _LARGEST_SHARE * gpu_bytes / explorer.engines_per_gpu:
            yield max(given, explorer.engines_per_gpu * used) + beyond
        if cache == least:
            return
        cache = max(least, cache // 2)


def _beyond_share(run: RunSettings) -> int:
    """Bytes that the engines of a GPU use beyond their share."""
    graphs = _GRAPHS_BYTES + (_ADAPTER_GRAPHS_BYTES if run.lora is not None else 0)
    return graphs * run.config.explorer.engines_per_gpu


def memory_lines(run: RunSettings, gpu_count: int, gpu_bytes: int | None) -> list[str]:
    """The lines of the dry run: what each process needs on a GPU. Empty without a GPU or a known model."""
    on_gpus = gpu_models(run, gpu_count) if gpu_count else None
    if on_gpus is None:
        return []
    lines, choice = [], choose_memory(run, gpu_count, gpu_bytes)
    if _trains(run):
        needed = _most_needed(run, on_gpus, choice)
        lines.append(
            f"trainer: {_gb(needed.total)} on each of {run.config.trainer.nproc} GPU(s): weights, gradients and "
            f"optimiser {_gb(needed.state)}, gathered weights {_gb(needed.gathered)}, activations of "
            f"{choice.max_tokens_per_pack:,} tokens {_gb(needed.activations)}, logits {_gb(needed.head)}"
            + (
                "; the ranks gather weights and sum gradients once a step"
                if choice.reduce_once and _ranks(run) > 1
                else ""
            )
            + (f"; while a model is loaded {_gb(needed.loading)}" if needed.loading > needed.training else "")
        )
    if gpu_bytes is not None:
        embedded = engine_kind(run.config, gpu_count) == "transformers"
        lines += [_engine_line(engine, gpu_bytes, choice, embedded) for engine in on_gpus.engines]
        if chosen := _chosen(run, choice, gpu_count):
            lines.append(f"chosen for this GPU: {', '.join(chosen)}")
    return lines


def _engine_line(engine: EngineModel, gpu_bytes: int, choice: MemoryChoice, embedded: bool) -> str:
    name = engine.name.removeprefix("an ").removeprefix("the ")
    if embedded:
        return f"{name}: {_gb(engine.weights)} of weights; running answers take up to a quarter of what is then free"
    share = _share_of(engine, gpu_bytes, choice)
    cache = max(share - engine.weights - _ENGINE_BYTES, 0)
    return (
        f"{name}: {_gb(share)} of {_gb(gpu_bytes)} (gpu_memory_utilization), of which about {_gb(cache)} "
        f"hold {cache // engine.cache_bytes:,} tokens of running answers"
    )


def _share_of(engine: EngineModel, gpu_bytes: int, choice: MemoryChoice) -> int:
    """Bytes of the share of one engine process."""
    return int(gpu_bytes * (engine.share or choice.engine_share))


def _chosen(run: RunSettings, choice: MemoryChoice, gpu_count: int) -> list[str]:
    """The values that the configuration leaves open, with the reason where one slows training down."""
    trainer, serving = run.config.trainer, run.config.explorer.rollout_model
    chosen, placement = [], place(run.config, gpu_count)
    if _trains(run):
        if trainer.max_token_len_per_gpu is None:
            chosen.append(f"trainer.max_token_len_per_gpu {choice.max_tokens_per_pack}")
        if trainer.gradient_checkpointing is None:
            beside = " beside the engine" if placement.shared else ""
            why = f" (without it packs of {_FAST_PACK:,} tokens do not fit{beside})"
            why = why if choice.gradient_checkpointing else ""
            chosen.append(f"trainer.gradient_checkpointing {str(choice.gradient_checkpointing).lower()}{why}")
        if trainer.cpu_offload is None and choice.cpu_offload:
            state = "the optimiser's state does" if run.lora is None else "the weights below the adapter do"
            chosen.append(f"trainer.cpu_offload true ({state} not fit on the GPU)")
    if serving.gpu_memory_utilization is None and placement.engines and engine_kind(run.config, gpu_count) == "vllm":
        chosen.append(f"explorer.rollout_model.gpu_memory_utilization {choice.engine_share:g}")
    if serving.enable_sleep_mode is None and choice.engine_sleeps:
        chosen.append("explorer.rollout_model.enable_sleep_mode true (engine and trainer take turns on the GPU)")
    return chosen


def memory_problems(run: RunSettings, gpu_count: int, gpu_bytes: int | None) -> Iterator[str]:
    """One line for each process that does not fit on a GPU of ``gpu_bytes``; nothing if that is unknown."""
    on_gpus = gpu_models(run, gpu_count) if gpu_count and gpu_bytes is not None else None
    if gpu_bytes is None or on_gpus is None:
        return
    serving, choice = run.config.explorer.rollout_model, choose_memory(run, gpu_count, gpu_bytes)
    for engine in on_gpus.engines:
        yield from _engine_problems(engine, gpu_bytes, choice)
    if serving.enable_sleep_mode and not choice.engine_sleeps:
        yield (
            "explorer.rollout_model.enable_sleep_mode true: the engine cannot sleep here, because it shares no GPU "
            "with the trainer, works at the same time (synchronizer.sync_offset, a dynamic sync style, online "
            "projects), or is not vLLM; leave the key out"
        )
    if _trains(run):
        shared = place(run.config, gpu_count).shared
        beside = _largest_engine(run, on_gpus, gpu_bytes, choice) if shared else None
        for models in on_gpus.trainings:
            yield from _training_problems(run, models, choice, gpu_bytes, beside)


def _engine_problems(engine: EngineModel, gpu_bytes: int, choice: MemoryChoice) -> Iterator[str]:
    """Why the weights and one answer do not fit in the share of an engine."""
    share, longest = _share_of(engine, gpu_bytes, choice), engine.longest or 0
    if engine.weights + _ENGINE_BYTES + longest * engine.cache_bytes > share:
        yield (
            f"{engine.key} {engine.share or choice.engine_share:g} gives {engine.name} {_gb(share)}, and "
            f"{_gb(engine.weights)} of weights with one answer of {longest:,} tokens do not fit: raise it, or raise "
            "tensor_parallel_size"
        )


def _largest_engine(
    run: RunSettings, on_gpus: GpuModels, gpu_bytes: int, choice: MemoryChoice
) -> tuple[EngineModel, int] | None:
    """The engines of a GPU that need most, with the bytes that they use; None without engines."""
    sizes = [(each, _share_of(each, gpu_bytes, choice) * each.a_gpu + _beyond_share(run)) for each in on_gpus.engines]
    return max(sizes, key=lambda one: one[1], default=None)


def _training_problems(
    run: RunSettings,
    models: Sequence[TrainerModel],
    choice: MemoryChoice,
    gpu_bytes: int,
    beside: tuple[EngineModel, int] | None,
) -> Iterator[str]:
    """Why the training of a policy does not fit on a GPU, ``beside`` engines."""
    needed = trainer_memory(run, models, choice)
    engine = 0 if beside is None else beside[1]
    if beside is not None and choice.engine_sleeps:
        if needed.at_rest + engine > gpu_bytes:
            yield (
                f"{beside[0].key} {beside[0].share or choice.engine_share:g}: the engine's {_gb(engine)} "
                f"and the {_gb(needed.at_rest)} that the trainer keeps between two rounds do not fit on a GPU of "
                f"{_gb(gpu_bytes)}: lower it, or leave it out"
            )
        engine = _beyond_share(run)
    room, share_key = gpu_bytes - engine, None if beside is None else _key_of_share(run, beside[0])
    if needed.total <= room:
        return
    place_text = f" on a GPU of {_gb(gpu_bytes)}" + (f" beside the engine's {_gb(engine)}" if engine else "")
    if needed.training > room:
        yield (
            f"trainer: needs about {_gb(needed.training)}{place_text} (weights, gradients and optimiser "
            f"{_gb(needed.state)}{_of_models(run, models, choice)}, activations {_gb(needed.activations)}, logits "
            f"{_gb(needed.head)}): {_remedy(run, choice, needed, room, share_key)}"
        )
        return
    yield (
        f"trainer: needs about {_gb(needed.loading)}{place_text} while it loads the models of "
        f"{', '.join(model.key for model in models)}, because each rank reads a model completely: "
        f"{_loading_remedy(run, share_key)}"
    )


def _key_of_share(run: RunSettings, engine: EngineModel) -> str | None:
    """The configuration key that sets the share of an engine; None if the plan sets it."""
    if engine.share is not None:
        return engine.key
    return None if run.config.explorer.rollout_model.gpu_memory_utilization is None else POLICY_SHARE


def _of_models(run: RunSettings, models: Sequence[TrainerModel], choice: MemoryChoice) -> str:
    """Which models the state consists of, if it is not only that of the policy of section ``model``."""
    if len(models) == 1 and len(run.config.policies) == 0:
        return ""
    return ": " + ", ".join(f"{each.key} {_gb(_model_memory(run, each, choice).state)}" for each in models)


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU that this process may use; None if nvidia-smi does not say it.

    An index in ``CUDA_VISIBLE_DEVICES`` is taken as nvidia-smi counts; CUDA counts so with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` or GPUs of one kind.
    """
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = Program(command, wall_s=20).run().stdout.decode().splitlines()
        gpus = [(index, uuid, int(mib)) for index, uuid, mib in (line.split(", ") for line in lines)]
        names = visible_gpus()
        if names is None:
            return min(mib for _, _, mib in gpus) * 2**20
        known = [[mib for index, uuid, mib in gpus if index == name or uuid.startswith(name)] for name in names]
        return min(min(sizes) for sizes in known) * 2**20  # a part of a GPU (MIG) is not known: min([]) fails
    except (OSError, ValueError):
        return None


def _remedy(run: RunSettings, choice: MemoryChoice, needed: TrainerMemory, room: int, share_key: str | None) -> str:
    ways = []
    rest = needed.training - int(_RESERVED * needed.activations)
    if rest < room and choice.max_tokens_per_pack > _PACK_STEP:
        left = (room - rest) / _RESERVED
        fitting = int(choice.max_tokens_per_pack * left / needed.activations) // _PACK_STEP * _PACK_STEP
        if fitting >= (run.config.model.max_model_len or 1):
            ways.append(f"set trainer.max_token_len_per_gpu to {fitting} or less, or leave it out")
    if not choice.gradient_checkpointing:
        ways.append("leave out trainer.gradient_checkpointing, or set it to true")
    if share_key is not None:
        ways.append(f"lower {share_key}, or leave it out")
    if needed.state > room // 2:
        ways.append("raise trainer.nproc, set trainer.cpu_offload to true, or train an adapter (model.lora_configs)")
    return "; or ".join(ways) or "use a GPU with more memory"


def _loading_remedy(run: RunSettings, share_key: str | None) -> str:
    """What to change if a whole model does not fit on a GPU while it is loaded."""
    ways = ["train an adapter (model.lora_configs)"] if run.lora is None else []
    if share_key is not None:
        ways.append(f"lower {share_key}, or leave it out")
    return "; or ".join([*ways, "use smaller models, or a GPU with more memory"])


def _trains(run: RunSettings) -> bool:
    return run.config.trains or run.config.online


def _gb(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
