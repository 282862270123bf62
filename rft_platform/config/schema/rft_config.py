"""The whole configuration file as one typed, frozen model."""

import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from rft_platform.config.schema.algorithm import Algorithm
from rft_platform.config.schema.buffer import Buffer
from rft_platform.config.schema.evaluation import Evaluation, Monitor, Registry
from rft_platform.config.schema.explorer import Engine, Explorer
from rft_platform.config.schema.prompt_search import PromptSearch
from rft_platform.config.schema.section import Options, Section, aliases
from rft_platform.config.schema.service import Service
from rft_platform.config.schema.trainer import Trainer, WarmStart

Mode = Literal["both", "explore", "train", "serve", "bench", "colocate"]

_POSITIVE: TypeAdapter[int] = TypeAdapter(PositiveInt)
_SYNC_METHODS = {"online": "nccl", "offline": "checkpoint"}
_SYNC_STYLES = {"explorer_driven": "dynamic_by_explorer", "trainer_driven": "dynamic_by_trainer"}


class LoraConfig(Section):
    """A LoRA adapter to train instead of the full weights."""

    lora_rank: PositiveInt = 32
    """Rank of the update matrices."""
    lora_alpha: PositiveInt = 32
    """Scale of the update: ``lora_alpha / lora_rank``."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get an adapter: ``all-linear``, a regular expression, or a list of names."""


class Model(Section):
    """The policy and its length limits, in tokens."""

    model_path: str = ""
    """A folder, a Hugging Face name, or ``models:/NAME@alias`` of the registry. Required."""
    critic_model_path: str | None = None
    """Model whose body the critic starts from (ppo). Default: the policy's."""
    max_model_len: PositiveInt | None = None
    """Prompt and response together. Default: the model's own limit."""
    max_prompt_tokens: PositiveInt | None = None
    """Maximum tokens of a prompt of workflow single_turn, chat template included. A run with a longer prompt fails, and
    the error names its task; other runs continue. The sum with ``max_response_tokens`` must not exceed
    ``max_model_len``, which is the only limit for prompts of other workflows."""
    max_response_tokens: PositiveInt | None = None
    """Limit of a response. Default: half of ``max_model_len``, or 1024."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. Policy-gradient algorithms need 1."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from the ``top_k`` likeliest tokens; -1 or 0: from all. Policy-gradient algorithms need all."""
    custom_chat_template: str | None = None
    """A Jinja file, or the template itself."""
    lora_configs: list[LoraConfig] = Field(default_factory=list)

    @property
    def response_limit(self) -> int:
        """Maximum tokens of a response: ``max_response_tokens`` if set, else half of ``max_model_len``, else 1024."""
        return self.max_response_tokens or (self.max_model_len or 2048) // 2


class FurtherPolicy(Section):
    """A policy in addition to the one of section ``model``.

    It has its own engine, configured by sections ``engine`` and ``explorer.rollout_model``, and is trained with the
    settings of sections ``algorithm``, ``buffer`` and ``trainer``. It shares all these sections with the first policy.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)
    """Name that calls use as their ``model``; also the name of the folder with its checkpoints."""
    model_path: str = Field(min_length=1)
    """Starting weights: a folder, a Hugging Face name, or ``models:/NAME@alias`` of the registry."""
    train: bool = True
    """false: the policy is served and its calls are recorded, but it is not trained."""

    @property
    def lease(self) -> str:
        """Stem of the names of the lease file and log file of the policy's engine."""
        return f"policy-{self.name}"


class Cluster(Section):
    """The machines of the run."""

    kind: Literal["local", "ray"] = "local"
    """``ray``: a Ray cluster runs engines, trainer and workers on its nodes ([cluster](cluster.md)). It needs the extra
    ``ray``, and token authentication."""
    address: str = "auto"
    """With ``kind`` ray, the ``HOST:PORT`` of the cluster's head; auto: ``RAY_ADDRESS``, else the cluster that this
    machine has joined."""
    namespace: str = "rft"
    """With ``kind`` ray, the namespace of the project's actors."""
    node_num: PositiveInt = 1
    """Number of machines of the trainer group; see ``trainer.rendezvous``."""
    gpu_per_node: NonNegativeInt | None = None
    """Default: all GPUs of the machine."""

    @property
    def ray(self) -> dict[str, str] | None:
        """Address and namespace of the Ray cluster; None for this machine."""
        return {"address": self.address, "namespace": self.namespace} if self.kind == "ray" else None


class OperatorConfig(Section):
    """One operator of the experience pipeline."""

    name: str
    """Built-in name, a name that a plugin registers, or ``package.module:function``."""
    args: Options = Field(default_factory=dict)
    """Options of the operator."""


class ExperiencePipeline(Section):
    """Operators on judged experiences, applied in this order before advantages are computed."""

    operators: list[OperatorConfig] = Field(default_factory=list)
    """Operators that run after those of the algorithm. An operator with the same name as one of the algorithm replaces
    it."""


class DataProcessor(Section):
    """Processing of data between exploration and training."""

    experience_pipeline: ExperiencePipeline = ExperiencePipeline()


class Synchronizer(Section):
    """When the explorer takes new weights, and how they are transferred. Each optimiser step makes a policy version."""

    sync_method: Annotated[Literal["nccl", "memory", "checkpoint"], aliases(_SYNC_METHODS)] = "checkpoint"
    """``online`` is an alias of nccl, ``offline`` an alias of checkpoint."""
    sync_style: Annotated[
        Literal["fixed", "dynamic_by_explorer", "dynamic_by_trainer"],
        aliases(_SYNC_STYLES),
    ] = "fixed"
    """``explorer_driven`` is an alias of dynamic_by_explorer, ``trainer_driven`` of dynamic_by_trainer."""
    sync_interval: PositiveInt = 1
    """fixed: explore batches per round. dynamic_by_explorer: explore batches after which the explorer takes newer
    weights, if any. dynamic_by_trainer: optimiser steps after which the trainer publishes weights."""
    sync_offset: NonNegativeInt = 0
    """Explore batches that the explorer may run ahead of the trainer. In the dynamic styles 0 means no bound."""
    max_staleness: NonNegativeInt | None = None
    """Maximum number of policy versions (optimiser steps) between the weights that sampled a row and the weights that
    train on it. Older rows are left out and counted. In the dynamic styles the explorer waits before its rows would
    become too old. Default: no limit."""
    sync_timeout: PositiveFloat = 3600.0
    """Modes explore and train, as two commands on one project: seconds to wait for the other command while it is not
    running. Other modes wait without a limit."""

    @property
    def dynamic(self) -> bool:
        """Whether a training takes all stored and judged rows, not only those of the training's round."""
        return self.sync_style != "fixed"

    @property
    def batches_a_round(self) -> int:
        """Explore batches per round; 1 in the dynamic styles, where each explore batch is stored as one round."""
        return 1 if self.dynamic else self.sync_interval

    @property
    def offset_rounds(self) -> int:
        """Rounds that exploration may start ahead of training: ``sync_offset`` in whole rounds, rounded up."""
        return math.ceil(self.sync_offset / self.batches_a_round)


class RftConfig(Section):
    """The complete configuration of a run."""

    mode: Mode = "both"
    """``both``: explore and train in rounds. ``explore``: only roll out and judge. ``train``: train on explored rounds
    or on a dataset (offline). ``bench``: evaluate the project's policies. ``colocate``: as ``both``, and the trainer
    shares the engines' GPUs. In the other modes the trainer has its own GPUs, the last ones of the machine, unless the
    machine has only one GPU."""
    project: str = Field(default="rft", min_length=1)
    """Name of the project, part of checkpoint paths and of the registered model's name."""
    group: str = ""
    """Label for the runs of related experiments: tag ``rft.group`` of the MLflow run."""
    name: str = Field(default="default", min_length=1)
    """Name of the experiment."""
    checkpoint_root_dir: str | None = None
    """Checkpoints are stored in ``<checkpoint_root_dir>/<project>/<name>``. Default: ``checkpoints`` below
    ``RFT_HOME``. An online project whose modes serve and train run on two hosts may name an object store, for example
    ``s3://bucket/checkpoints``: then checkpoints are stored below ``RFT_HOME`` and copied there."""
    store_url: str | None = None
    """Durable copy of rounds, rows and checkpoints: a URL of fsspec, for example ``s3://bucket/project``. A stage is
    stored there before it counts as done, checkpoints in the background, and an empty ``RFT_HOME`` on another host
    continues the project ([store](store.md#stores-that-are-not-a-local-disk)). Needs the extra ``s3`` or ``gcs``.
    Default: ``RFT_HOME`` only."""
    continue_from_checkpoint: bool = True
    """false: refuse to start in a folder that holds rounds already."""
    seed: NonNegativeInt = 42
    """Seed of sampling, task order and training."""
    model: Model = Model()
    policies: list[FurtherPolicy] = Field(default_factory=list)
    """Trainable policies in addition to that of ``model``; each learns from the calls that name it."""
    algorithm: Algorithm = Algorithm()
    cluster: Cluster = Cluster()
    buffer: Buffer = Buffer()
    explorer: Explorer = Explorer()
    data_processor: DataProcessor = DataProcessor()
    trainer: Trainer = Trainer()
    synchronizer: Synchronizer = Synchronizer()
    monitor: Monitor = Monitor()
    engine: Engine = Engine()
    warm_start: WarmStart | None = None
    evaluation: Evaluation = Evaluation()
    prompt_search: PromptSearch | None = None
    registry: Registry = Registry()
    service: Service = Service()

    _notices: tuple[str, ...] = PrivateAttr(default=())
    _folder: Path | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _one_place_a_setting(cls, data: Any) -> Any:
        """Merge keys that are synonyms of one setting into the key that the platform reads."""
        return _fold_synonyms(data) if isinstance(data, dict) else data

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines about how the file was read: foreign keys without effect. They are not part of the configuration."""
        return self._notices

    def with_notices(self, notices: tuple[str, ...]) -> "RftConfig":
        """Set the lines about how the file was read; returns this same object."""
        self._notices = notices
        return self

    @property
    def folder(self) -> Path | None:
        """The folder of the file that the configuration was read from: its relative paths start there. None: no file.

        It is not part of the configuration.
        """
        return self._folder

    def in_folder(self, folder: Path | None) -> "RftConfig":
        """Set the folder of the file; returns this same object."""
        self._folder = folder
        return self

    def __eq__(self, other: object) -> bool:
        """Whether the settings are equal; notices and folder do not count."""
        return isinstance(other, RftConfig) and self.__dict__ == other.__dict__

    @property
    def trainer_nodes(self) -> int:
        """Machines of the trainer group; without Ray and an endpoint only that of the control plane."""
        spans = self.cluster.kind == "ray" or self.trainer.rendezvous.endpoint is not None
        return self.cluster.node_num if spans else 1

    @property
    def checkpoint_folder(self) -> str | None:
        """``checkpoint_root_dir`` if it is a folder; None for the default, and for an object store."""
        root = self.checkpoint_root_dir
        return None if root is None or "://" in root else root

    @property
    def offline_steps(self) -> int | None:
        """Optimiser steps of an offline training; None: ``buffer.total_epochs`` passes over its dataset."""
        given = [steps for steps in (self.buffer.total_steps, self.trainer.total_steps) if steps is not None]
        return min(given, default=None)

    @property
    def models_of_training(self) -> dict[str, str]:
        """The models that only the trainer loads, by configuration key; empty in a mode that does not train."""
        named = {
            "algorithm.teacher_model_path": self.algorithm.teacher_model_path,
            "model.critic_model_path": self.model.critic_model_path,
        }
        return {key: path for key, path in named.items() if path is not None and self.trains}

    @property
    def trains(self) -> bool:
        """Whether the mode trains; in mode serve another process may."""
        return self.mode in ("both", "train", "colocate")

    @property
    def explores(self) -> bool:
        """Whether the mode explores."""
        return self.mode in ("both", "explore", "colocate")

    @property
    def online(self) -> bool:
        """Whether the rows come from production traffic (``rft serve``) and not from tasks that the platform runs."""
        buffer = self.buffer
        sql = buffer.trainer_input.experience_buffer.storage_type == "sql"
        without_tasks = sql and not buffer.explorer_input.explored
        return self.mode == "serve" or (self.mode in ("both", "train") and without_tasks)

    @property
    def restarts_after_refusal(self) -> bool:
        """Whether a training starts again from the version that serves if the gate refused the version before."""
        chosen = self.evaluation.after_refusal
        return self.online if chosen is None else chosen == "restart"


def _fold_synonyms(data: dict[str, Any]) -> dict[str, Any]:
    """A copy in which each synonym is replaced by the key that the platform reads; the validation checks the values."""
    data = deepcopy(data)
    buffer = data.get("buffer")
    if isinstance(buffer, dict) and "eval_tasksets" in buffer:
        _one_list_of_eval_tasksets(buffer)

    _one_interval_of_evaluations(data)
    explored = _get(data, "buffer.explorer_input.tasksets")
    count = len(explored) if isinstance(explored, list) else 0
    for place in ("taskset", *(f"tasksets.{index}" for index in range(count))):
        _same_setting(data, f"buffer.explorer_input.{place}.rollout_args.n", "algorithm.repeat_times")
    return data


def _one_interval_of_evaluations(data: dict[str, Any]) -> None:
    """Convert ``explorer.eval_interval``, in explore batches, to ``evaluation.every``, in rounds."""
    fixed = _get(data, "synchronizer.sync_style", "fixed") == "fixed"
    batches_a_round = _positive(_get(data, "synchronizer.sync_interval", 1)) if fixed else 1
    batches = _positive(_get(data, "explorer.eval_interval"))
    if batches is None or batches_a_round is None:
        return
    section, rounds = _section(data, "evaluation"), math.ceil(batches / batches_a_round)
    given = section.setdefault("every", rounds)
    # A stored configuration has every key: there the default says nothing beside evaluation.every.
    if batches != Explorer.model_fields["eval_interval"].default and _positive(given) not in (rounds, None):
        raise ValueError(
            f"explorer.eval_interval {batches} (explore batches: {rounds} rounds) and evaluation.every {given} (rounds)"
            " are the same setting: give one of them"
        )


def _positive(value: Any) -> int | None:
    """The number that the validation makes of ``value``, for example of a quoted one; None: it refuses the value."""
    try:
        return _POSITIVE.validate_python(value)
    except ValidationError:
        return None


def _one_list_of_eval_tasksets(buffer: dict[str, Any]) -> None:
    inputs, given = _section(buffer, "explorer_input"), buffer.pop("eval_tasksets")
    if inputs.get("eval_tasksets") is None:
        inputs["eval_tasksets"] = given
    elif given and inputs["eval_tasksets"] != given:
        raise ValueError(
            "buffer.eval_tasksets and buffer.explorer_input.eval_tasksets are the same setting: give one of them"
        )


def _same_setting(data: dict[str, Any], synonym: str, key: str) -> None:
    value = _get(data, synonym)
    if value is None:
        return
    *parents, last = key.split(".")
    section = data
    for parent in parents:
        section = _section(section, parent)
    if section.get(last) is None:
        section[last] = value
    elif section[last] != value:
        synonym = re.sub(r"\.(\d+)\b", r"[\1]", synonym)
        raise ValueError(f"{synonym} {value} and {key} {section[last]} are the same setting: give one of them")


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    if data.get(name) is None:
        data[name] = {}
    return data[name] if isinstance(data[name], dict) else {}


def _get(data: Any, key: str, default: Any = None) -> Any:
    for name in key.split("."):
        if isinstance(data, list) and name.isdecimal():
            data = data[int(name)]
        else:
            data = data.get(name) if isinstance(data, dict) else None
    return default if data is None else data
