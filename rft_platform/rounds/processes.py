"""How a project reaches its engine, its trainer group and its registry: found where they run, else started."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.errors import UserError
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.project import Project

if TYPE_CHECKING:
    from rft_platform.registry.models import ModelRegistry
    from rft_platform.training.group import TrainerClient


def start_all(project: Project) -> None:
    """Start engine, trainer and registry side by side: each takes seconds, most of them imports."""
    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(connect, project) for connect in (connect_engine, connect_trainer)]
        connect_registry(project).prepare()
        for connection in started:
            connection.result()


def connect_engine(project: Project) -> PolicyEngine:
    """A healthy policy engine for the project's base model; which version it serves is up to ``deploy``."""
    from rft_platform.inference.launcher import find_or_start_engine

    config, home = project.config, project.home
    return find_or_start_engine(
        base_model_folder(project),
        home.leases,
        home.logs,
        kind=config.engine.kind,
        dtype=config.engine.dtype,
        device=config.engine.device,
        threads=config.engine.threads,
        idle_timeout_s=config.engine.idle_timeout_s,
        max_model_len=config.model.max_model_len,
        seed=config.explorer.rollout_model.seed,
        tool_call_parser=config.explorer.rollout_model.tool_call_parser,
        chat_template=config.model.custom_chat_template,
    )


def connect_trainer(project: Project) -> "TrainerClient":
    """A trainer group that takes commands."""
    from rft_platform.training.group import find_or_start_trainer

    settings, home = project.config.trainer, project.home
    return find_or_start_trainer(
        home.leases,
        home.logs,
        nproc=settings.nproc,
        threads=settings.threads,
        idle_timeout_s=settings.idle_timeout_s,
    )


def connect_registry(project: Project, tracking_uri: str | None = None) -> "ModelRegistry":
    """The model registry: at ``tracking_uri``, ``MLFLOW_TRACKING_URI``, as configured, or in SQLite below the home."""
    home = project.home
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or project.config.registry.tracking_uri
    local = f"sqlite:///{home.mlflow / 'mlflow.db'}"
    return _registry(
        uri or local, None if uri else home.mlflow / "artifacts", project.config.project, project.model_name
    )


@lru_cache(maxsize=8)
def _registry(uri: str, artifacts: Path | None, project: str, model_name: str) -> "ModelRegistry":
    """One registry a process: opening MLflow's store costs seconds, and it may be shared."""
    from rft_platform.registry.models import ModelRegistry

    return ModelRegistry(uri, artifacts, project, model_name)


def base_model_folder(project: Project) -> Path:
    """The folder of the base model: as named, downloaded from the hub, or looked up in the registry."""
    name = project.config.model.model_path
    if name.startswith("models:/"):
        return connect_registry(project).resolve(name).folder
    folder = Path(name)
    if folder.is_dir():
        return folder
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model.model_path {name!r} is neither a folder nor a model of the Hugging Face hub that can be "
            f"fetched from here ({error.__class__.__name__}): give a folder with config.json, weights and tokenizer"
        ) from error
