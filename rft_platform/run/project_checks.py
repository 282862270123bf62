"""Checks of a project before its start: its folder, disk space, models, engines, services and functions of the user."""

import os
import re
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rft_platform.common.digests import weight_files
from rft_platform.common.errors import UserError
from rft_platform.common.user_code import load_object
from rft_platform.config.allowed_changes import check_unchanged, relocated
from rft_platform.config.findings import Finding, error, note, raised
from rft_platform.config.home import Home
from rft_platform.config.load import load_config_of
from rft_platform.config.online_halves import before_joining
from rft_platform.config.resolve import policies_of
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.rounds.project.project import Project

_LEAST_FREE = 256 * 2**20  # bytes for databases, logs and rows of a small run
_COPIES = 6  # copies of the weights: a checkpoint has weights and two moments, and two checkpoints exist at a time
_LIMIT_S = 3.0  # for a connection to a service
_MISREAD = re.compile(r"\?|%[0-9A-Fa-f]{2}")  # in the path of an SQLite file in a URL
_PORTS = {"http": 80, "https": 443}


def folder_problems(project: Project) -> Iterator[Finding]:
    """Results of another project, a folder that cannot be written, a full disk; also of ``checkpoint_root_dir``."""
    config, home = project.config, project.home
    yield from raised(check_may_start, home, config, key="RFT_HOME")
    yield from raised(check_writable, home)
    trained = config.trains and not config.model.lora_configs
    model = Path(config.model.model_path) if trained else None
    no_room = list(raised(check_room, home.root, model))
    if config.checkpoint_folder is not None and config.trains:
        key, folder = "checkpoint_root_dir", project.checkpoints
        yield from raised(_check_folder, key, folder)
        no_room += raised(lambda: check_room(folder, model, key))
    if no_room:
        yield from () if is_finished(project) else no_room


def algorithm_problems(project: Project) -> Iterator[Finding]:
    """Operators and priorities that do not exist or do not fit."""
    from rft_platform.rounds.selection.row_selection import priority_of
    from rft_platform.rounds.setup.algorithm import check_operators

    yield from raised(check_operators, project.settings)
    yield from raised(priority_of, project.config.buffer.trainer_input.experience_buffer.replay_buffer)


def service_problems(project: Project) -> Iterator[Finding]:
    """Missing keys and functions of services, and services that cannot be reached."""
    from rft_platform.online.releases.shared_place import exchange_key
    from rft_platform.online.traffic.project_traffic import check_database
    from rft_platform.rounds.setup.side_engines import check_keys

    config = project.config
    yield from raised(check_keys, config)
    for reference in config.service.selection:
        yield from raised(load_object, reference, "service.selection", key="service.selection")
    if config.service.redaction is not None:
        yield from raised(load_object, config.service.redaction, "service.redaction", key="service.redaction")
    if config.online:
        yield from raised(check_database, project)
        yield from raised(exchange_key, config)
    if not (is_finished(project) or (config.online and project.home.holds_results)):  # a restart does not wait
        yield from unreachable(config)


def model_problems(project: Project) -> Iterator[Finding]:
    """Engines that cannot start here, incomplete model folders, and versions that no registry has."""
    from rft_platform.inference.launch.launcher import check_model_folder
    from rft_platform.rounds.setup.connections import check_engines, check_registered

    model = Path(project.config.model.model_path)
    if project.settings.offline is None or project.config.buffer.explorer_input.eval_tasksets:
        yield from raised(check_engines, project)
    if model.is_dir():
        yield from raised(check_model_folder, model)
    for problem in raised(_check_template, project.config.model.custom_chat_template):
        yield error(f"model.custom_chat_template: {problem}")
    for key, name in _models(project.config).items():
        if name.startswith("models:/"):
            yield from raised(check_registered, project, name, key)


def _check_template(source: str | None) -> None:
    from rft_platform.openai_api.templates import check_template, load_template

    if (text := load_template(source)) is not None:
        check_template(text)


def missing_models(project: Project) -> Iterator[Finding]:
    """Models that engines or trainer would not find at their start; names of hub models are looked up on the hub."""
    from rft_platform.rounds.setup.connections import check_model

    for key, name in _models(project.config).items():
        yield from raised(check_model, name, key)


def unfetched_models(project: Project) -> Iterator[Finding]:
    """Hub models that a run would download first; uses no network."""
    from rft_platform.rounds.setup.connections import is_hub_name, was_fetched

    for key, name in _models(project.config).items():
        if is_hub_name(name) and not was_fetched(name):
            yield note(f"{key} {name}: neither a folder here nor in the Hugging Face cache; a run downloads it first")


def _models(config: RftConfig) -> dict[str, str]:
    """The models that engines and trainer load, by configuration key."""
    models = {policy.key: policy.model_path for policy in policies_of(config).values()}
    own = [entry for entry in config.explorer.auxiliary_models if not entry.base_url]
    models |= {f"explorer.auxiliary_models ({entry.known_as}).model_path": entry.model_path for entry in own}
    return models | config.models_of_training


def check_may_start(home: Home, config: RftConfig) -> None:
    """Raise UserError if the folder has results of another project, or of this project with other settings."""
    from rft_platform.online.releases.exchange import followed_home

    if not home.config_file.exists() or not home.holds_results:
        return
    if config.mode != "serve" and (place := followed_home(home)) is not None:
        raise UserError(
            f"{home.root} only serves, and its versions come from the home that publishes at {place}: train there, or "
            "point RFT_HOME at another folder"
        )
    old = relocated(load_config_of(home), config)
    if (old.project, old.name) != (config.project, config.name):
        raise UserError(
            f"{home.root} holds the project {old.project}/{old.name}, not {config.project}/{config.name}: point "
            "RFT_HOME at another folder, or move this project away"
        )
    check_unchanged(before_joining(old, config), config)
    if not config.continue_from_checkpoint and home.rounds.is_dir():
        raise UserError(
            f"continue_from_checkpoint is false, and {home.root} holds rounds of {old.project}/{old.name}: set it "
            "to true to continue, or point RFT_HOME at another folder"
        )


def check_writable(home: Home) -> None:
    """Raise UserError if the project's folder cannot be created or written, or a database's URL cannot name it."""
    if found := _MISREAD.search(str(home.root)):
        raise UserError(
            f"RFT_HOME {home.root}: {found[0]!r} has another meaning in the URLs of Dagster's and MLflow's databases; "
            "expected a path without ? and without % before two hexadecimal digits; rename the folder"
        )
    _check_folder("RFT_HOME", home.root)


def _check_folder(key: str, path: Path) -> None:
    """Raise UserError if the folder ``path``, which ``key`` names, cannot be created or written."""
    folder = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "a link to nothing"
        raise UserError(f"{key} {path}: {folder} is {kind}; point {key} at a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{key} {path}: {folder} cannot be written; point {key} at a folder that you own")


def check_room(path: Path, model: Path | None = None, key: str = "RFT_HOME") -> None:
    """Raise UserError if the disk of ``path`` has no space for a few checkpoints of ``model``; None: a small model.

    ``key`` names the folder ``path`` in the message.
    """
    free = shutil.disk_usage(nearest_folder(path)).free
    weights = sum(file.stat().st_size for file in weight_files(model)) if model is not None else 0
    needed = max(_LEAST_FREE, _COPIES * weights)
    if free < needed:
        raise UserError(
            f"{key} {path}: no space, {free / 2**20:,.0f} MiB free and {needed / 2**20:,.0f} MiB needed for "
            f"rows and checkpoints; free disk space, or point {key} at another disk"
        )


def nearest_folder(path: Path) -> Path:
    """``path``, or its nearest existing parent."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def is_finished(project: Project) -> bool:
    """Whether nothing is left to do in the project's folder."""
    from rft_platform.rounds.planning.plan import plan_next
    from rft_platform.rounds.planning.project_state import Launches, observe

    return project.home.holds_results and plan_next(observe(project, Launches())).finished


def unreachable(config: RftConfig) -> Iterator[Finding]:
    """One line for each address at which no process accepts a connection; each address is tried once."""
    tried: dict[tuple[str, int], str | None] = {}
    for key, url in _addresses(config):
        parts = urlsplit(url)
        if parts.hostname is None or parts.scheme not in _PORTS or _by_proxy(parts.scheme, parts.hostname):
            continue
        try:
            place = (parts.hostname, parts.port or _PORTS[parts.scheme])
        except ValueError as problem:  # the port
            yield error(f"{key} {url}: {problem}")
            continue
        if place not in tried:
            tried[place] = _refusal(place)
        if (reason := tried[place]) is not None:
            where = f"{place[0]}:{place[1]}"
            yield error(f"{key} {url}: nothing answers at {where} ({reason}); start it, or correct the address")


def _addresses(config: RftConfig) -> Iterator[tuple[str, str]]:
    if (uri := os.environ.get("MLFLOW_TRACKING_URI")) is not None:
        yield "MLFLOW_TRACKING_URI", uri
    elif config.registry.tracking_uri is not None:
        yield "registry.tracking_uri", config.registry.tracking_uri
    for index, entry in enumerate(config.explorer.auxiliary_models):
        if entry.base_url is not None:
            yield f"explorer.auxiliary_models[{index}].base_url", entry.base_url
    if config.online and config.service.implicit_feedback is not None:
        yield "service.implicit_feedback.base_url", config.service.implicit_feedback.base_url
    inputs = config.buffer.explorer_input
    for taskset in inputs.every.values():
        parts = taskset.judge if isinstance(taskset.judge, list) else []
        for arguments in [taskset.judge_args, *(part.args for part in parts)]:
            if (url := _base_url(arguments)) is not None:
                yield f"judge_args.model.base_url ({taskset.path})", url


def _base_url(arguments: dict[str, Any]) -> str | None:
    model = arguments.get("model")
    url = model.get("base_url") if isinstance(model, dict) else None
    return url if isinstance(url, str) else None


def _by_proxy(scheme: str, host: str) -> bool:
    """Whether clients reach the host through a proxy. A proxy may reach addresses that this machine cannot."""
    return scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)


def _refusal(place: tuple[str, int]) -> str | None:
    """Why no connection can be made; None if one was made."""
    try:
        socket.create_connection(place, _LIMIT_S).close()
    except OSError as problem:
        return problem.strerror or str(problem) or type(problem).__name__
    return None
