"""The project's auxiliary models, served while a phase needs them: engines of their own, or endpoints elsewhere."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.errors import EngineError, UserError
from rft_platform.rollout.auxiliary import AuxiliaryModel, AuxiliarySpec, handed_out
from rft_platform.rounds.processes import engine_spec, model_folder
from rft_platform.rounds.project import Project

if TYPE_CHECKING:
    from rft_platform.config.explorer import AuxiliaryModel as Entry
    from rft_platform.config.schema import RftConfig
    from rft_platform.inference.client import EngineClient

#: An engine that nobody asks ends after its idle time-out: the phase that may yet ask it looks at it so often.
_AWAKE_S = 20.0


@contextmanager
def serving_auxiliaries(project: Project) -> Iterator[dict[str, AuxiliaryModel]]:
    """The models of ``explorer.auxiliary_models`` by name, each ready to be asked; an empty dict where there are none.

    Engines are found where they run, else started side by side, and go on after the block until they are idle or
    ``rft stop``. Raises UserError, before anything is started, where a key is not in the environment, and EngineError
    where an engine does not come up.
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
def auxiliaries_for_judge(project: Project, judge: object | None) -> Iterator[dict[str, Any]]:
    """As a judge function is handed them; none are served where ``judge`` is None and nobody would ask them."""
    if judge is None:
        yield {}
        return
    with serving_auxiliaries(project) as models:
        yield handed_out(models)


def check_keys(config: "RftConfig") -> None:
    """Raise UserError for each auxiliary model whose key is not in the environment."""
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
    """Where each model is served; its engines are kept from ending meanwhile."""
    config = project.config
    first = config.explorer.rollout_model.tensor_parallel_size * config.explorer.rollout_model.engine_num
    starts: list[tuple[Entry, int, int]] = []
    for entry in entries:
        starts += [(entry, number, first) for number in range(0 if entry.base_url else entry.engine_num)]
        first += entry.devices
    with ThreadPoolExecutor(len(starts) or 1) as pool:
        started = [pool.submit(_connect, project, *start) for start in starts]
    clients = [future.result() for future in started]
    by_name: dict[str, list[EngineClient]] = {entry.known_as: [] for entry in entries}
    for (entry, _, _), client in zip(starts, clients, strict=True):
        by_name[entry.known_as].append(client)
    specs = []
    for entry in entries:
        urls = [client.base_url for client in by_name[entry.known_as]] or [entry.base_url or ""]
        keys = tuple(client.api_key for client in by_name[entry.known_as])
        model = entry.model or ("" if entry.base_url else by_name[entry.known_as][0].status().model_path)
        specs.append(_spec(config, entry, urls[0], model, tuple(urls[1:]), keys))
    with awake(clients):
        yield specs


def _connect(project: Project, entry: "Entry", number: int, first_gpu: int) -> "EngineClient":
    """One engine process of an auxiliary model."""
    from rft_platform.inference.launcher import GPU_FILES, find_or_start_engine
    from rft_platform.inference.pool_start import replica_gpus

    on_gpu = project.config.engine.device != "cpu" and any(Path(file).exists() for file in GPU_FILES)
    return find_or_start_engine(
        model_folder(project, entry.model_path, f"explorer.auxiliary_models ({entry.known_as}).model_path"),
        project.home.leases,
        project.home.logs,
        engine_spec(project.config, entry, replica=number, max_model_len=entry.max_model_len),
        name=entry.lease,
        replica=number,
        gpus=replica_gpus(number, entry.tensor_parallel_size, first_gpu) if on_gpu else None,
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
    if entry.base_url and entry.enable_thinking is not None:  # an engine of ours knows it from its start
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
def awake(clients: Sequence["EngineClient"]) -> Iterator[None]:
    """Ask the engines how they are every now and then, so that none ends for want of work within the block."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(_AWAKE_S):
            for client in clients:
                with suppress(EngineError):  # whoever asks the model next is told
                    client.status()

    thread = threading.Thread(target=ask, name="auxiliaries", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for client in clients:
            client.close()
