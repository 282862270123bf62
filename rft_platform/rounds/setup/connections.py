"""Connections of a project to its engine, its trainer group and its registry; missing processes are started.

``connect_registry`` gives the model versions in MLflow of the project's policies.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.cluster.this_process import keep_imports
from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import EngineError, UserError
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.common.redaction import redact
from rft_platform.common.sqlite_files import database_file
from rft_platform.config.gpu_placement import (
    POLICY_ENGINE,
    engine_gpus,
    engine_share,
    gpu_count,
    place,
    visible_devices,
)
from rft_platform.config.home import Home
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.interface import PolicyEngine
from rft_platform.model_registry.models import NotedVersion, lost
from rft_platform.model_registry.sqlite_reader import read_versions
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish, published, read
from rft_platform.tasks.sources import without_hub_messages

if TYPE_CHECKING:
    from rft_platform.config.schema.explorer import Engine, RolloutModel
    from rft_platform.config.schema.rft_config import FurtherPolicy, RftConfig
    from rft_platform.inference.client import EngineClient
    from rft_platform.inference.launch.launcher import EngineSpec
    from rft_platform.inference.vllm_engine.server_settings import VllmOptions
    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.training.service.trainer_client import TrainerClient

LOG = logging.getLogger(__name__)


def configured_uri(project: Project) -> str | None:
    """MLflow's address from ``MLFLOW_TRACKING_URI`` or the configuration; None means SQLite in the project's home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or project.config.registry.tracking_uri or None


def local_uri(home: Home) -> str:
    """The address of the project's own SQLite registry."""
    return f"sqlite:///{home.mlflow / 'mlflow.db'}"


def newest_noted(store: ExperienceStore, name: str = DEFAULT_POLICY) -> NotedVersion | None:
    """The version of the newest registered policy; None if nothing is registered yet. Reads only the newest notes."""
    for number in reversed(store.rounds()):
        policy = published(store, number, name)
        if policy is not None and policy.model_version is not None:
            note = read(store, number).file(Policy, name)
            return NotedVersion(int(policy.model_version), policy.weights_digest, note)
    return None


def check_registry(project: Project) -> None:
    """Raise RegistryLostError if an SQLite registry lacks the newest noted version, before anything starts.

    Reads the database file directly, because importing MLflow takes seconds. A server is checked at connection time.
    """
    noted, uri = newest_noted(project.store), configured_uri(project) or local_uri(project.home)
    file = database_file(uri)
    if noted is None or file is None:
        return
    if not file.exists():
        raise lost(f"{file} does not exist", noted, project.model_name, file)
    versions = read_versions(uri, project.model_name)
    if versions is not None and all(version.version != noted.version for version in versions):
        raise lost(f"{file} does not know this version", noted, project.model_name, file)


#: Distance between the seed ranges of replicas. Requests without a seed count up from their engine's own seed.
SEEDS_A_REPLICA = 2**20
#: Patterns of the files downloaded for a model of the hub.
_OF_MODEL = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_REPEATED = ["consolidated*.safetensors"]  # the same weights once more, in the form of Mistral's own library


def start_all(project: Project) -> None:
    """Start engines, trainer and registry in parallel: each takes seconds, mostly for imports.

    In mode train of an online project another process, perhaps on another host, serves the policy.
    """
    with ThreadPoolExecutor(3) as pool:
        starts: tuple[Callable[[Project], object], ...] = (connect_engine, connect_policies, connect_trainer)
        if project.traffic is not None and project.config.mode == "train":
            starts = (connect_trainer,)
        started = [pool.submit(start, project) for start in starts]
        connect_registry(project).prepare()
        keep_imports()  # MLflow; no user code has run yet
        for connection in started:
            connection.result()


def connect_engine(project: Project) -> PolicyEngine:
    """Return a healthy policy engine for the project's base model; ``deploy`` sets the version it serves.

    With ``engine_num`` above 1 the engine is a pool of that many replicas; replicas beyond that number are stopped.
    """
    from rft_platform.inference.launch.launcher import STOP_TIMEOUT_S, replica_name
    from rft_platform.inference.launch.pool_start import find_or_start_pool

    explorer, folder = project.config.explorer, base_model_folder(project)
    count = explorer.rollout_model.engine_num
    wanted = {replica_name(number) for number in range(count)}
    for surplus in project.cluster.running(f"{POLICY_ENGINE}-*"):  # an earlier configuration may have started it
        if surplus.name not in wanted:
            project.cluster.stop(surplus.name, STOP_TIMEOUT_S)
    if count == 1:
        return connect_replica(project, folder)
    return find_or_start_pool(count, lambda number: connect_replica(project, folder, number), explorer.engines_per_gpu)


def connect_replica(project: Project, folder: Path, number: int = 0) -> "EngineClient":
    """Find or start one engine process of the project, for the base model in ``folder``; or find it in ``urls``."""
    if urls := project.config.engine.urls:
        from rft_platform.inference.launch.external import external_engine

        return external_engine(urls[number], engine_token(project.config), folder)
    return start_engine(project, POLICY_ENGINE, folder, policy_spec(project, number), number)


def start_engine(project: Project, name: str, folder: Path, spec: "EngineSpec", replica: int = 0) -> "EngineClient":
    """Find or start an engine process on its GPUs; the only engine of the first policy may use all of them."""
    from rft_platform.inference.launch.launcher import find_or_start_engine
    from rft_platform.inference.launch.pool_start import engine_devices

    config = project.config
    if config.cluster.kind == "ray":
        share = engine_share(config, project.gpus, name)
        return find_or_start_engine(folder, project.cluster, spec, name=name, replica=replica, reserved_gpus=share)
    alone = name == POLICY_ENGINE and config.explorer.rollout_model.engine_num == 1
    on_gpu = config.engine.device != "cpu" and project.gpus > 0
    gpus = engine_devices(engine_gpus(config)[name, replica]) if on_gpu and not alone else None
    return find_or_start_engine(folder, project.cluster, spec, name=name, replica=replica, gpus=gpus)


def free_gpus(project: Project) -> None:
    """Let the engines that share GPUs with the trainer sleep; each wakes with its next request."""
    if not project.memory.engine_sleeps:
        return
    from rft_platform.inference.client import EngineClient
    from rft_platform.inference.launch.launcher import replica_name

    cluster = project.cluster
    for name, number in engine_gpus(project.config):
        address = cluster.find(replica_name(number, name))
        if address is None:
            continue
        try:
            with EngineClient(address, cluster) as client:
                client.sleep()
        except EngineError as error:  # a dead engine holds no memory
            LOG.warning("the engine at %s does not sleep: %s", address.url, error)


def connect_policies(project: Project) -> dict[str, "EngineClient"]:
    """A healthy engine for each policy of section ``policies``, by name; started in parallel."""
    config = project.config

    def connect(entry: "FurtherPolicy") -> "EngineClient":
        return start_engine(project, entry.lease, start_folder(project, entry.name, verify=False), policy_spec(project))

    with ThreadPoolExecutor(len(config.policies) or 1) as pool:
        clients = list(pool.map(connect, config.policies))
    return {entry.name: client for entry, client in zip(config.policies, clients, strict=True)}


def start_folder(project: Project, policy: str, *, verify: bool = True) -> Path:
    """The folder of the model that a policy starts from."""
    start = project.policies[policy]
    return model_folder(project, start.model_path, start.key, verify=verify)


def engine_spec(
    config: "RftConfig",
    serving: "RolloutModel",
    *,
    replica: int = 0,
    max_model_len: int | None = None,
    chat_template: str | None = None,
    lora_rank: int = 0,
    gpu_share: float | None = None,
    sleeps: bool = False,
) -> "EngineSpec":
    """Engine settings for ``serving``, the policy's model or an auxiliary one."""
    from rft_platform.inference.launch.launcher import EngineSpec

    engine = config.engine
    return EngineSpec(
        kind=engine.kind,
        dtype=engine.dtype,
        device=engine.device,
        threads=engine.threads,
        idle_timeout_s=engine.idle_timeout_s,
        heartbeat_timeout_s=engine.heartbeat_timeout_s,
        max_model_len=max_model_len,
        seed=serving.seed + replica * SEEDS_A_REPLICA,
        tool_call_parser=serving.tool_call_parser,
        reasoning_parser=serving.reasoning_parser,
        enable_thinking=serving.enable_thinking,
        chat_template=chat_template,
        python=engine.python,
        vllm=_vllm_options(engine, serving, lora_rank, gpu_share or serving.gpu_memory_utilization, sleeps),
    )


def policy_spec(project: Project, replica: int = 0) -> "EngineSpec":
    """Engine settings for a trained policy."""
    config = project.config
    model, rank = config.model, config.engine.max_lora_rank
    if rank is None:
        rank = max((adapter.lora_rank for adapter in model.lora_configs), default=0)
    return engine_spec(
        config,
        config.explorer.rollout_model,
        replica=replica,
        max_model_len=model.max_model_len,
        chat_template=model.custom_chat_template,
        lora_rank=rank,
        gpu_share=project.memory.engine_share,
        sleeps=project.memory.engine_sleeps,
    )


def _vllm_options(
    engine: "Engine", serving: "RolloutModel", lora_rank: int, gpu_share: float | None, sleeps: bool
) -> "VllmOptions":
    """The settings for ``serving`` that only a vLLM engine has."""
    from rft_platform.inference.vllm_engine.server_settings import VllmOptions

    given = {} if gpu_share is None else {"gpu_memory_utilization": gpu_share}
    return VllmOptions(
        enable_prefix_caching=serving.enable_prefix_caching,
        gpu_dtype=serving.dtype,
        enforce_eager=serving.enforce_eager,
        tensor_parallel_size=serving.tensor_parallel_size,
        kv_cache_gb=engine.kv_cache_gb,
        sleeps=sleeps,
        max_lora_rank=lora_rank,
        arguments=engine.vllm_args,
        **given,
    )


def check_engines(project: Project) -> None:
    """Raise UserError if the engine of the policy or of an auxiliary model could not start on this machine."""
    from rft_platform.inference.launch.external import external_engine
    from rft_platform.inference.launch.launcher import check_engine

    config, folder = project.config, Path(project.config.model.model_path)
    for url in config.engine.urls:
        try:
            external_engine(url, engine_token(config), folder if folder.is_dir() else None).close()
        except EngineError as error:
            raise UserError(f"{error}; start it with `rft engine`, or correct engine.urls") from error
    if not config.engine.urls:
        check_engine(policy_spec(project))
    for entry in project.config.explorer.auxiliary_models:
        if not entry.base_url:
            check_engine(engine_spec(project.config, entry))


def engine_token(config: "RftConfig") -> str:
    """The token of the engines that somebody else runs. Raises UserError if its variable is not set or not ASCII."""
    name = config.engine.token_env or ""
    if not (token := os.environ.get(name, "")):
        raise UserError(f"engine.token_env {name}: this environment variable is not set; set it to the engines' token")
    if not token.isascii():
        raise UserError(f"engine.token_env {name}: the token has a character that is not ASCII; use another one")
    return token


def connect_trainer(project: Project) -> "TrainerClient":
    """Return a client of a running trainer group; start the group if necessary."""
    client = trainer_client(project)
    client.ensure_running()
    return client


def trainer_client(project: Project) -> "TrainerClient":
    """A client of the project's trainer group, whether the group is running or not."""
    from rft_platform.training.launch import configured_service
    from rft_platform.training.service.trainer_client import TrainerClient

    if project.config.cluster.kind == "ray":
        service = configured_service(project.config, project.memory, None, reserved_gpus=float(project.gpus > 0))
    else:
        own = place(project.config, gpu_count()).trainer
        service = configured_service(project.config, project.memory, None if own is None else visible_devices(own))
    return TrainerClient(project.cluster, service, project.config.trainer.heartbeat_timeout_s)


def connect_registry(project: Project, tracking_uri: str | None = None) -> "ModelRegistry":
    """The model registry at ``tracking_uri``, ``MLFLOW_TRACKING_URI``, the configured address, or SQLite in the home.

    Its first call raises RegistryLostError if MLflow lacks the newest version in the project's notes.
    """
    home, given = project.home, tracking_uri or configured_uri(project)
    artifacts, most = None if given else home.mlflow / "artifacts", project.config.registry.upload_max_gb * 1e9
    return _registry(given or local_uri(home), artifacts, project.config.project, project.model_name, home.rounds, most)


@lru_cache(maxsize=8)
def _registry(
    uri: str, artifacts: Path | None, project: str, model_name: str, rounds: Path, upload_max_bytes: float
) -> "ModelRegistry":
    """One shared registry per process and address, because opening MLflow's store takes seconds."""
    from rft_platform.model_registry.models import ModelRegistry

    noted = partial(newest_noted, ExperienceStore(rounds))
    return ModelRegistry(uri, artifacts, project, model_name, noted, upload_max_bytes=upload_max_bytes)


def publish_base(project: Project, name: str = DEFAULT_POLICY) -> Policy:
    """Version 0 of a policy; its base model becomes version 0 if none is published."""
    known = published(project.store, 0, name)
    if known is not None:
        return known
    folder = start_folder(project, name)
    policy = Policy(str(folder), 0, digest_weights(folder), round=0, name=name)
    publish(project.store, policy)
    return policy


def base_model_folder(project: Project) -> Path:
    """The folder of the base model: a local folder, a download from the hub, or a model of the registry."""
    unread = published(project.store, 0) is None  # training starts from version 0 once that is published
    return start_folder(project, DEFAULT_POLICY, verify=unread)


def model_folder(project: Project, name: str, key: str, *, verify: bool = True) -> Path:
    """The folder of the model that the configuration key ``key`` names; ``verify`` reads a registered model's files.

    Raises UserError for a name that is neither a folder nor a model of the hub or the registry.
    """
    if name.startswith("models:/"):
        return connect_registry(project).resolve(name, verify=verify).folder
    folder = Path(name)
    if folder.is_dir():
        return folder
    return _from_hub(name, key)


def check_model(name: str, key: str) -> None:
    """Raise UserError if a model is not a folder and not available from the hub. Fetches only its ``config.json``."""
    if is_hub_name(name):
        _from_hub(name, key, ["config.json"])


def check_registered(project: Project, name: str, key: str) -> None:
    """Raise UserError if ``models:/NAME@alias`` or ``models:/NAME/3`` names no version with a checkpoint.

    Reads the SQLite file directly and creates nothing; a server's models are looked up when a run starts.
    """
    from rft_platform.model_registry.sqlite_reader import model_name, read_versions

    uri, model = configured_uri(project) or local_uri(project.home), model_name(name)
    if model is None:
        raise UserError(f"{key} {name}: expected models:/NAME@alias or models:/NAME/3")
    file = database_file(uri)
    versions = [] if file is not None and not file.exists() else read_versions(uri, model)
    if versions is None:
        return
    found = next((each for each in versions if name in each.addresses), None)
    if found is None:
        names = ", ".join(address for each in versions for address in each.addresses)
        raise UserError(
            f"{key} {name}: no such version in {redact(uri)}, which has {names or f'no versions of {model}'}; for a "
            "version of another project give its checkpoint's folder, or set registry.tracking_uri to that project's "
            "registry, as in sqlite:////ITS/RFT_HOME/mlflow/mlflow.db"
        )
    if not found.folder.is_dir():
        raise UserError(f"{key} {name} is version {found.version}, but its folder {found.folder} does not exist")


def is_hub_name(name: str) -> bool:
    """Whether a name refers to the Hugging Face hub, i.e. is neither a folder nor a name of the registry."""
    return not name.startswith("models:/") and not Path(name).is_dir()


def was_fetched(name: str) -> bool:
    """Whether a hub model is in the local cache; uses no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot_download(name, allow_patterns=["config.json"], local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return False
    return True


def _from_hub(name: str, key: str, patterns: Sequence[str] = _OF_MODEL) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with without_hub_messages():
            return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=_REPEATED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{key} {name!r}: there is no such folder, and {_not_fetched(error)}; expected a folder with config.json, "
            "weights and tokenizer, or a model of the Hugging Face hub, as in Qwen/Qwen3-0.6B"
        ) from error


def _not_fetched(error: Exception) -> str:
    """Why a model of the hub could not be fetched, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return "it is no name of a model of the hub: correct the name"
    if isinstance(error, GatedRepoError):
        return "the hub gives this model only to users who asked for it: set HF_TOKEN to your token"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or it is private: correct the name, or set HF_TOKEN to your token"
    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached from here and the model is not in its cache: connect, or name a folder"
    return f"the model cannot be fetched from the hub ({error.__class__.__name__}): try again, or name a folder"
