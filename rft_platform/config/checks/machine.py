"""Checks against this machine: its files, programs, processors and GPUs, and their memory."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rft_platform.common.redaction import names_a_secret
from rft_platform.config.findings import Finding, error, warning
from rft_platform.config.gpu_placement import gpu_count, place
from rft_platform.config.memory_plan import gpu_bytes, memory_problems
from rft_platform.config.paths import is_missing
from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.explorer import RolloutModel
from rft_platform.config.schema.rft_config import RftConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks compare a configuration with."""

    cpus: int
    gpus: int  # CUDA devices
    gpu_bytes: int | None = None  # memory of the smallest GPU; None: unknown, and the memory is not checked
    compiler: bool = True  # whether there is a C compiler
    trains: bool = True  # whether runs train here; False: a run launcher starts them on other machines

    @classmethod
    def here(cls) -> "Machine":
        """This machine."""
        compiler = "CC" in os.environ or any(map(shutil.which, ("gcc", "clang", "cc")))
        return cls(cpu_count(), gpu_count(), gpu_bytes(), compiler)


def cpu_count() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_problems(run: RunSettings, machine: Machine) -> Iterator[Finding]:
    """One line for each missing file and for each request that exceeds this machine."""
    config, cpus, gpus = run.config, machine.cpus, machine.gpus
    root = config.checkpoint_folder
    if root is None and config.checkpoint_root_dir is not None:
        yield from _store_problems(config, config.checkpoint_root_dir)
    elif root is not None and not Path(root).is_absolute():
        yield error(
            f"checkpoint_root_dir {root}: is not an absolute path; give the folder for checkpoints in full, as in "
            f"/data/checkpoints, or as ./{root} for a folder beside the configuration file"
        )
    yield from stored_copy_problems(config)
    if config.monitor.openlineage and find_spec("openlineage") is None:
        yield error(
            "monitor.openlineage needs the package openlineage-python, which is not installed: run pip install "
            "'rft-platform[openlineage]', or set the key to false"
        )
    yield from _model_problems(config)
    yield from _data_problems(config)
    yield from _worker_problems(config)
    if config.mode != "train":
        yield from _engine_problems(config, cpus, gpus)
    if config.trains:
        yield from _trainer_problems(config, machine)
        yield from _saving_problems(run)
        yield from _placement_problems(config, gpus)
    yield from map(error, memory_problems(run, gpus, machine.gpu_bytes))
    compiles = config.trainer.torch_compile is not False or config.engine.kind != "transformers"
    if gpus and compiles and not machine.compiler:
        yield warning(
            "trainer.torch_compile, like engine.kind vllm, builds code for the GPU with a C compiler, and this machine "
            "has none: install gcc, g++ and libc6-dev, or set the keys to false and transformers"
        )


def stored_copy_problems(config: RftConfig) -> Iterator[Finding]:
    """One line for each reason why ``store_url`` cannot hold the copy of the home."""
    url = config.store_url
    if url is None:
        return
    from fsspec.core import split_protocol
    from fsspec.registry import get_filesystem_class

    if config.checkpoint_root_dir is not None:
        yield error(
            f"store_url {url}: stores the checkpoints below RFT_HOME, and checkpoint_root_dir names another place: "
            "leave out one of them"
        )
    try:
        get_filesystem_class(split_protocol(url)[0] or "")
    except (ImportError, ValueError) as problem:
        yield error(f"store_url {url}: {problem}; expected a URL such as s3://bucket/project, and the extra s3 or gcs")


def _store_problems(config: RftConfig, url: str) -> Iterator[Finding]:
    """One line for each reason why checkpoints cannot be passed on through an object store."""
    from fsspec.core import split_protocol
    from fsspec.registry import get_filesystem_class

    if not (config.online and config.mode in ("serve", "train")):
        yield error(
            f"checkpoint_root_dir {url}: an object store passes versions from mode train to mode serve of an online "
            f"project; in mode {config.mode} give a folder"
        )
    elif config.buffer.trainer_input.experience_buffer.path is None:
        yield error(
            f"checkpoint_root_dir {url}: both hosts need one database; set buffer.trainer_input.experience_buffer.path "
            "to its URL, as in postgresql+psycopg2://rft@db/traffic"
        )
    try:
        get_filesystem_class(split_protocol(url)[0])
    except (ImportError, ValueError) as problem:
        yield error(f"checkpoint_root_dir {url}: {problem}")


def _model_problems(config: RftConfig) -> Iterator[Finding]:
    model = config.model
    if not model.model_path:
        yield error("model.model_path is not set: give a model folder, a Hugging Face name or models:/NAME@alias")
    elif not model.model_path.startswith("models:/"):
        yield from _folder_problems("model.model_path", model.model_path)
    for index, auxiliary in enumerate(config.explorer.auxiliary_models):
        if auxiliary.model_path and not auxiliary.model_path.startswith("models:/"):
            yield from _folder_problems(f"explorer.auxiliary_models[{index}].model_path", auxiliary.model_path)
    for index, policy in enumerate(config.policies):
        if not policy.model_path.startswith("models:/"):
            yield from _folder_problems(f"policies[{index}].model_path", policy.model_path)
    for key, path in config.models_of_training.items():
        if not path.startswith("models:/"):
            yield from _folder_problems(key, path, tokenizer=False)
    if model.max_model_len is not None:
        parts = {"max_prompt_tokens": model.max_prompt_tokens, "max_response_tokens": model.max_response_tokens}
        given = {f"model.{key} {value}": value for key, value in parts.items() if value}
        if (length := sum(given.values())) > model.max_model_len:
            total = f" = {length}" if len(given) > 1 else ""
            yield error(
                f"{' + '.join(given)}{total} exceeds model.max_model_len {model.max_model_len}: raise the limit or "
                f"lower {'one of them' if total else 'it'}"
            )


def _worker_problems(config: RftConfig) -> Iterator[Finding]:
    workers = config.explorer.workers
    if workers.kind == "inprocess":
        for key, value in (("python", workers.python), ("count", workers.count)):
            if value is not None:
                yield error(
                    f"explorer.workers.{key} is {value}, but workflows run in this process: set explorer.workers.kind "
                    f"to process, or leave out explorer.workers.{key}"
                )
    elif workers.python is not None and shutil.which(workers.python) is None:
        yield error(
            f"explorer.workers.python {workers.python}: no such program; give the interpreter of the environment that "
            "the agent needs, as in /envs/agents/bin/python"
        )
    if workers.runtime_env.fields:
        yield from _runtime_env_problems(config)


def _runtime_env_problems(config: RftConfig) -> Iterator[Finding]:
    """Why workers cannot have their runtime environment, and variables that a stored file must not have."""
    key, workers = "explorer.workers.runtime_env", config.explorer.workers
    if config.cluster.kind == "local" or workers.kind == "inprocess":
        yield error(
            f"{key}: Ray builds it for processes on its nodes, but cluster.kind is {config.cluster.kind} and "
            f"explorer.workers.kind {workers.kind}; set them to ray and process, or leave it out (on one machine, "
            "explorer.workers.python names the interpreter of another environment)"
        )
    if workers.python is not None and (workers.runtime_env.pip or workers.runtime_env.uv):
        yield error(
            f"{key}: pip and uv install for Ray's interpreter, not for explorer.workers.python {workers.python}; "
            "leave out one of the two"
        )
    for name in workers.runtime_env.env_vars:
        if names_a_secret(name):
            yield error(
                f"{key}.env_vars.{name} is a secret by its name, and configurations are stored as plain text: leave it "
                "out and export it where the run starts; workers get the variables of that command"
            )


def _folder_problems(key: str, path: str, *, tokenizer: bool = True) -> Iterator[Finding]:
    folder = Path(path)
    if not folder.exists():
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
            problem = "is a placeholder" if path.startswith("/path/to/") else "no such folder"
            yield error(f"{key} {path}: {problem}; give a model folder, or a Hugging Face name such as owner/model")
    elif not folder.is_dir():
        yield error(f"{key} {path}: this is a file; give the folder with config.json, the weights and the tokenizer")
    elif not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        yield error(f"{key} {path}: contains no config.json; give the folder of a Hugging Face model")
    elif tokenizer and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield error(f"{key} {path}: contains no tokenizer; save one there with AutoTokenizer.save_pretrained")


def _data_problems(config: RftConfig) -> Iterator[Finding]:
    inputs = config.buffer.explorer_input
    paths = [(f"{key}.path", taskset.path) for key, taskset in inputs.every.items()]
    if config.warm_start is not None:
        paths.append(("warm_start.path", config.warm_start.path))
    for key, path in paths:
        if is_missing(path):
            given = path or repr(path)
            yield error(f"{key} {given}: no such file or folder; give a file, a folder of splits or a dataset's name")


def _engine_problems(config: RftConfig, cpus: int, gpus: int) -> Iterator[Finding]:
    serving, cluster = config.explorer.rollout_model, config.cluster
    if gpus and cluster.kind == "local" and cluster.node_num == 1 and (wanted := cluster.gpu_per_node or 0) > gpus:
        yield error(f"cluster.gpu_per_node {wanted}: this machine has {gpus} GPUs; set it to {gpus}")
    if config.engine.urls:
        yield from _external_problems(config)
        return
    if gpus == 0 and serving.engine_num > cpus and not cluster.gpu_per_node:
        yield error(
            f"explorer.rollout_model.engine_num {serving.engine_num}: this machine has {cpus} processors; set it "
            f"to {cpus} or less"
        )
    if (each := config.explorer.engines_per_gpu) > 1:
        yield from _sharing_problems(serving, each)
    # Without a GPU the replicas share the processor, and ``cluster`` describes another machine.
    declared = cluster.node_num * (gpus if cluster.gpu_per_node is None else cluster.gpu_per_node)
    if cluster.kind == "ray":
        declared = gpus
    available = max(declared, 1)
    needed = config.explorer.policy_gpus if declared else serving.tensor_parallel_size
    auxiliaries = sum(model.devices for model in config.explorer.auxiliary_models) if declared else 0
    further = serving.tensor_parallel_size * len(config.policies) if declared else 0
    if needed + auxiliaries + further > available:
        others = f" and {auxiliaries} for explorer.auxiliary_models" if auxiliaries else ""
        others += f" and {further} for policies" if further else ""
        yield error(
            f"explorer.rollout_model.tensor_parallel_size {serving.tensor_parallel_size} * engine_num "
            f"{serving.engine_num}{others} needs {needed + auxiliaries + further} devices, and {available} "
            "are available: lower one of them, or raise cluster.gpu_per_node on a machine that has more"
        )


def _external_problems(config: RftConfig) -> Iterator[Finding]:
    """Problems of engines that somebody else runs."""
    engine, replicas = config.engine, config.explorer.rollout_model.engine_num
    if len(engine.urls) != replicas:
        yield error(
            f"engine.urls names {len(engine.urls)} engines and explorer.rollout_model.engine_num is {replicas}: set it "
            f"to {len(engine.urls)}"
        )
    if wrong := [url for url in engine.urls if not _is_server(url)]:
        yield error(f"engine.urls {wrong[0]}: expected http://HOST:PORT or https://HOST:PORT")
    if engine.token_env is None:
        yield error("engine.urls: set engine.token_env to the name of the environment variable with their token")
    if config.policies:
        yield error("engine.urls: engines that somebody else runs serve one policy; leave out policies, or engine.urls")


def _is_server(url: str) -> bool:
    """Whether ``url`` is ``http://HOST:PORT`` or the same with https; the port may be missing."""
    try:
        parts = urlsplit(url)
        has_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        return has_address and url.split() == [url]  # urlsplit leaves out white space around an address
    except ValueError:  # no number, or brackets that do not close
        return False


def _sharing_problems(serving: RolloutModel, engines_per_gpu: int) -> Iterator[Finding]:
    key = f"explorer.engines_per_gpu {engines_per_gpu}"
    if serving.tensor_parallel_size > 1:
        size = serving.tensor_parallel_size
        yield error(f"{key}: a replica of tensor_parallel_size {size} cannot share its GPUs; set it to 1")
    share = serving.gpu_memory_utilization
    if share is not None and engines_per_gpu * share > 1:
        yield error(
            f"{key}: {engines_per_gpu} * gpu_memory_utilization {share:g} is more than a GPU has; set "
            f"gpu_memory_utilization to {1 / engines_per_gpu:.2g} or less, or leave it out"
        )


def _placement_problems(config: RftConfig, gpus: int) -> Iterator[Finding]:
    """One line if the trainer needs GPUs of the engines and the configuration does not permit shared GPUs."""
    if config.cluster.kind == "ray":  # ``run/cluster_checks.py`` looks at each node
        return
    placement, ranks = place(config, gpus), config.trainer.nproc
    enough = placement.engines <= gpus and ranks <= gpus  # if false, other checks report the problem
    if placement.shared and config.mode != "colocate" and gpus > 1 and enough:
        yield error(
            f"trainer.nproc {ranks}: the engines use {placement.engines} GPUs, the trainer {ranks}, and this machine "
            f"has {gpus}: lower trainer.nproc or explorer.rollout_model.engine_num, or share GPUs by mode: "
            "colocate"
        )


def _trainer_problems(config: RftConfig, machine: Machine) -> Iterator[Finding]:
    devices, kind = (machine.gpus, "GPUs") if machine.gpus else (machine.cpus, "processors")
    found = []
    if (ranks := config.trainer.nproc) > devices:
        found.append((f"trainer.nproc {ranks}: this machine has {devices} {kind}", f"set it to {devices} or less"))
    if config.trainer.cpu_offload and not machine.gpus:
        text = "trainer.cpu_offload moves parameters off the GPU, and there is no GPU here"
        found.append((text, "set it to false"))
    for problem, remedy in found:
        if machine.trains:
            yield error(f"{problem}; {remedy}")
        else:
            yield warning(f"{problem}; runs need it where the run_launcher of dagster.yaml starts them")


def _saving_problems(run: RunSettings) -> Iterator[Finding]:
    """One line if checkpoints have no weights, but an engine reads them."""
    config = run.config
    if config.trainer.save_hf_checkpoint != "never":
        return
    if run.offline is None:
        yield error(
            f"trainer.save_hf_checkpoint never: in mode {config.mode} the engine reads every policy as Hugging Face "
            "weights; set it to last"
        )
    elif config.buffer.explorer_input.eval_tasksets and run.lora is None:  # an adapter is always written
        yield error(
            "trainer.save_hf_checkpoint never: the engine reads the trained weights for "
            "buffer.explorer_input.eval_tasksets; set it to last, or leave out the tasksets"
        )
