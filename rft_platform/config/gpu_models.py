"""The models that lie on the GPUs of engines and trainer, each with its own shape.

A model whose folder is not known yet counts as large as the first policy; an auxiliary model of that kind is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rft_platform.config.gpu_placement import engine_gpus, engine_kind, on_trainer_gpus, place
from rft_platform.config.model_shape import ModelShape
from rft_platform.config.resolve import PolicySettings, RunSettings, policies_of
from rft_platform.config.schema.explorer import RolloutModel
from rft_platform.config.schema.rft_config import RftConfig

POLICY_SHARE = "explorer.rollout_model.gpu_memory_utilization"  # key of the share of the policies' engines


@dataclass(frozen=True, slots=True)
class TrainerModel:
    """A model on the trainer's GPUs."""

    key: str  # configuration key that names it
    shape: ModelShape
    trained: bool  # all its weights; False: none, or only an adapter
    adapter: int = 0  # parameters of the adapter that is trained
    adapter_values: int = 0  # values of a token in a layer that the adapter adds


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model that an engine process serves."""

    key: str  # configuration key of its share of a GPU
    name: str  # how messages name its engine
    shape: ModelShape
    share: float | None  # the user's share of a GPU
    ranks: int  # GPUs of the process
    a_gpu: int  # processes of this kind on a GPU
    longest: int | None  # tokens of an answer with its prompt; None: unknown
    value_bytes: int = 2  # of a weight, and of a value in the cache

    @property
    def weights(self) -> int:
        """Bytes of the weights on one GPU."""
        return self.value_bytes * self.shape.parameters // self.ranks

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key-value cache for one token on one GPU."""
        return max(1, 2 * self.value_bytes * self.shape.layers * self.shape.keys // self.ranks)


@dataclass(frozen=True, slots=True)
class GpuModels:
    """What lies on the GPUs: the models of the engines, and those of the trainer while it trains one policy."""

    engines: tuple[EngineModel, ...]  # that of the first policy comes first
    trainings: tuple[tuple[TrainerModel, ...], ...]  # of each trained policy; the policy comes first


def gpu_models(run: RunSettings, gpu_count: int) -> GpuModels | None:
    """The models of a run on a machine with ``gpu_count`` GPUs; None if the first policy's shape is unknown."""
    first = ModelShape.of(run.config.model.model_path)
    if first is None:
        return None
    policies = policies_of(run.config)
    shapes = {name: _shape(policy.model_path, first) for name, policy in policies.items()}
    trainings = tuple(
        tuple(_trainer_models(run, policy, shapes[name])) for name, policy in policies.items() if policy.train
    )
    return GpuModels(tuple(_engine_models(run, shapes, gpu_count)), trainings)


def _shape(model: str | None, otherwise: ModelShape) -> ModelShape:
    return (ModelShape.of(model) if model else None) or otherwise


def _trainer_models(run: RunSettings, policy: PolicySettings, shape: ModelShape) -> Iterator[TrainerModel]:
    """The models that the trainer holds while it trains a policy of this shape."""
    config, lora = run.config, run.lora
    if lora is None:
        yield TrainerModel(policy.key, shape, trained=True)
    else:  # the base model is the reference, too
        values = lora.rank * len(shape.adapted(lora))
        yield TrainerModel(policy.key, shape, False, shape.adapter(lora), values)
    if run.spec.critic is not None:
        critic = config.model.critic_model_path
        yield TrainerModel("model.critic_model_path", _shape(critic, shape), trained=True)
    reference = run.algorithm.reference == "always" or run.spec.beta or run.spec.kl_penalty is not None
    if reference and lora is None:
        yield TrainerModel(f"{policy.key} (reference)", shape, trained=False)
    if run.algorithm.teacher:
        teacher = _shape(config.algorithm.teacher_model_path, shape)
        yield TrainerModel("algorithm.teacher_model_path", teacher, trained=False)


def _engine_models(run: RunSettings, shapes: dict[str, ModelShape], gpu_count: int) -> Iterator[EngineModel]:
    """The engines of the policies, and those of auxiliary models on the trainer's GPUs."""
    config, serving = run.config, run.config.explorer.rollout_model
    if not place(config, gpu_count).engines:
        return
    for number, (name, shape) in enumerate(shapes.items()):
        a_gpu, longest = 1 if number else config.explorer.engines_per_gpu, config.model.max_model_len
        called = f"the engine of policy {name}" if number else "an engine"
        given, ranks = serving.gpu_memory_utilization, serving.tensor_parallel_size
        size = _value_bytes(config, serving, gpu_count)
        yield EngineModel(POLICY_SHARE, called, shape, given, ranks, a_gpu, longest, size)
    for entry in config.explorer.auxiliary_models:
        processes = [number for name, number in engine_gpus(config) if name == entry.lease]
        beside = any(on_trainer_gpus(config, gpu_count, entry.lease, number) for number in processes)
        known = ModelShape.of(entry.model_path) if beside else None
        if known is not None:
            key, called = f"explorer.auxiliary_models ({entry.known_as})", f"the engine of {entry.known_as}"
            given, ranks = entry.gpu_memory_utilization, entry.tensor_parallel_size
            size, longest = _value_bytes(config, entry, gpu_count), entry.max_model_len
            yield EngineModel(f"{key}.gpu_memory_utilization", called, known, given, ranks, 1, longest, size)


def _value_bytes(config: RftConfig, serving: RolloutModel, gpu_count: int) -> int:
    """Bytes of a value in an engine on a GPU; the embedded engine does not read the model's ``dtype``."""
    on_gpu = serving.dtype if engine_kind(config, gpu_count) == "vllm" else "bfloat16"
    return 4 if (on_gpu if config.engine.dtype == "auto" else config.engine.dtype) == "float32" else 2
