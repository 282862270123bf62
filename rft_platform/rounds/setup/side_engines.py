"""Engines beside the one of the first policy.

Auxiliary models (``explorer.auxiliary_models``) are engines of this project or external endpoints. Each policy of
section ``policies`` has an engine, which serves the version that the stage names.

In an online project evaluations have a separate engine, so that users never get a version that did not pass a gate. If
the machine has no GPU left for it, or no node of a Ray cluster has room, evaluations use the serving engine. The
candidate of a release has one, too.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import EngineError, UserError
from rft_platform.config.gpu_placement import (
    CANDIDATE_ENGINE,
    EVALUATION_ENGINE,
    engine_gpus,
    gpu_count,
    on_trainer_gpus,
    place,
)
from rft_platform.config.node_placement import holds_online_engine
from rft_platform.inference.interface import PolicyEngine
from rft_platform.judging.execution.judge_rollouts import TasksetJudge
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel, AuxiliarySpec
from rft_platform.rollout.workflows.chat_models import framework_models
from rft_platform.rounds.project.policy import deploy
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy
from rft_platform.rounds.project.repair import repair_on_failure
from rft_platform.rounds.setup.connections import (
    base_model_folder,
    connect_engine,
    connect_policies,
    engine_spec,
    model_folder,
    policy_spec,
    start_engine,
)

if TYPE_CHECKING:
    from rft_platform.config.schema.explorer import AuxiliaryModel as Entry
    from rft_platform.config.schema.rft_config import RftConfig
    from rft_platform.inference.client import EngineClient
    from rft_platform.inference.launch.launcher import EngineSpec


#: Interval of the status requests that keep an idle engine below its idle time-out while a stage may still call it.
_AWAKE_S = 20.0


@contextmanager
def serving_auxiliaries(project: Project) -> Iterator[dict[str, AuxiliaryModel]]:
    """Yield the models of ``explorer.auxiliary_models`` by name, ready for calls; an empty dict if there are none.

    Running engines are reused; missing ones are started in parallel. After the block the engines keep running until
    their idle time-out or ``rft stop``. Raises UserError, before anything is started, if an API key is not in the
    environment, and EngineError if an engine does not start.
    """
    entries = project.config.explorer.auxiliary_models
    if not entries:
        yield {}
        return
    check_keys(project.config)
    with _served(project, entries) as specs:
        models = {spec.name: AuxiliaryModel(spec) for spec in specs}
        try:
            yield models
        finally:
            for model in models.values():
                model.close()


@contextmanager
def auxiliaries_for_judges(project: Project, judges: Mapping[str, TasksetJudge]) -> Iterator[dict[str, Any]]:
    """Yield the auxiliary models in the form that a judge function receives; none is started if no judge asks one."""
    if not any(each.spec is not None and each.spec.asks_models for each in judges.values()):
        yield {}
        return
    with serving_auxiliaries(project) as models:
        yield framework_models(models)


def check_keys(config: "RftConfig") -> None:
    """Raise UserError that names every auxiliary model whose API key is not in the environment."""
    problems = []
    for entry in config.explorer.auxiliary_models:
        try:
            _spec(config, entry, entry.base_url or "", entry.model or "").api_key()
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))


@contextmanager
def _served(project: Project, entries: Sequence["Entry"]) -> Iterator[list[AuxiliarySpec]]:
    """Yield the address and settings of each model; keep its engines from reaching their idle time-out in the block."""
    config = project.config
    starts = [(entry, number) for entry in entries for number in range(0 if entry.base_url else entry.engine_num)]
    with ThreadPoolExecutor(len(starts) or 1) as pool:
        started = [pool.submit(_connect, project, *start) for start in starts]
    clients = [future.result() for future in started]
    by_name: dict[str, list[EngineClient]] = {entry.known_as: [] for entry in entries}
    for (entry, _), client in zip(starts, clients, strict=True):
        by_name[entry.known_as].append(client)
    specs = []
    for entry in entries:
        urls = [client.base_url for client in by_name[entry.known_as]] or [entry.base_url or ""]
        keys = tuple(client.api_key for client in by_name[entry.known_as])
        model = entry.model or ("" if entry.base_url else by_name[entry.known_as][0].status().model_path)
        specs.append(_spec(config, entry, urls[0], model, tuple(urls[1:]), keys))
    with keep_awake(clients):
        yield specs


def _connect(project: Project, entry: "Entry", number: int) -> "EngineClient":
    """Find or start one engine process of an auxiliary model."""
    key = f"explorer.auxiliary_models ({entry.known_as}).model_path"
    spec = auxiliary_spec(project, entry, number)
    return start_engine(project, entry.lease, model_folder(project, entry.model_path, key), spec, number)


def auxiliary_spec(project: Project, entry: "Entry", number: int) -> "EngineSpec":
    """Engine settings for an auxiliary model. On a GPU of the trainer the memory plan sets its share and its sleep."""
    memory = project.memory
    shared = on_trainer_gpus(project.config, project.gpus, entry.lease, number)
    return engine_spec(
        project.config,
        entry,
        replica=number,
        max_model_len=entry.max_model_len,
        gpu_share=(entry.gpu_memory_utilization or memory.engine_share) if shared else None,
        sleeps=shared and memory.engine_sleeps,
    )


def _spec(
    config: "RftConfig",
    entry: "Entry",
    base_url: str,
    model: str,
    other_urls: tuple[str, ...] = (),
    engine_keys: tuple[str, ...] = (),
) -> AuxiliarySpec:
    given = {"temperature": entry.temperature, "top_p": entry.top_p, "max_tokens": entry.max_response_tokens}
    defaults: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if entry.base_url and entry.enable_thinking is not None:  # the platform's engines get this setting at their start
        defaults["chat_template_kwargs"] = {"enable_thinking": entry.enable_thinking}
    return AuxiliarySpec(
        name=entry.known_as,
        model=model,
        base_url=base_url,
        api_key_env=entry.api_key_env,
        timeout_s=entry.timeout_s,
        max_concurrency=entry.max_concurrency or config.explorer.runner_per_model * (1 + len(other_urls)),
        other_urls=other_urls,
        engine_keys=engine_keys,
        defaults=defaults,
        identity=entry.identity(model),
    )


@contextmanager
def keep_awake(clients: Sequence["EngineClient"]) -> Iterator[None]:
    """Request the engines' status at intervals, so that none reaches its idle time-out within the block."""
    over = threading.Event()

    def request_status() -> None:
        while not over.wait(_AWAKE_S):
            for client in clients:
                with suppress(EngineError):  # the next call of the model reports the error
                    client.status()

    thread = threading.Thread(target=request_status, name="auxiliaries", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for client in clients:
            client.close()


@contextmanager
def serving_policies(project: Project, policies: Mapping[str, Policy]) -> Iterator[dict[str, PolicyEngine]]:
    """Yield the engines of all policies but the first, by name; each serves exactly its version in ``policies``.

    Running engines are reused; missing ones are started in parallel. After a weight change each engine is compared with
    the trainer's log-probs. Raises the errors of ``deploy``, and EngineError if an engine does not start.
    """
    if not project.config.policies:
        yield {}
        return
    clients = connect_policies(project)
    with keep_awake(list(clients.values())):
        for name, client in clients.items():
            with repair_on_failure(project, policies[name]):
                deploy(client, policies[name])
        yield dict(clients)


def connect_evaluation_engine(project: Project) -> PolicyEngine:
    """The engine that evaluations and warm starts use."""
    if project.traffic is None or shares_engine(project):
        return connect_engine(project)
    return start_engine(project, EVALUATION_ENGINE, base_model_folder(project), policy_spec(project))


def connect_candidate_engine(project: Project) -> "EngineClient":
    """The engine that serves the candidate of a release. Raises UserError if there is no room for it."""
    if project.config.engine.urls:
        raise UserError("engine.urls names all engines, so none can be started for a candidate: remove engine.urls")
    if not _has_devices(project, CANDIDATE_ENGINE):
        there = "; ".join(map(str, project.cluster.nodes()))
        lacking = f"no node has room (there is {there})" if there else "no GPU is left"
        raise UserError(
            f"{lacking} for the engine of a candidate: lower explorer.rollout_model.engine_num or trainer.nproc"
            f"{', or add nodes' if there else ''}"
        )
    return start_engine(project, CANDIDATE_ENGINE, base_model_folder(project), policy_spec(project))


def shares_engine(project: Project) -> bool:
    """Whether evaluations use the engine that serves production traffic."""
    return not _has_devices(project, EVALUATION_ENGINE)


def _has_devices(project: Project, name: str) -> bool:
    config, gpus = project.config, gpu_count()
    if config.engine.urls:
        return False  # the engines that somebody else runs are all there are
    if config.cluster.kind == "ray":
        return holds_online_engine(config, project.cluster.nodes(), name)
    if config.engine.device == "cpu" or not gpus:
        return True
    return engine_gpus(config)[name, 0].stop <= gpus - place(config, gpus).trainer_count
