"""Find the running engine process by its lease, or start one."""

import json
import os
import secrets
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import rft_platform
from rft_platform.common.errors import EngineError, UserError
from rft_platform.common.files import digest_file, digest_json, read_json
from rft_platform.common.locks import LOCK_TIMEOUT_S, locked
from rft_platform.common.processes.lease import is_alive, read_lease, remove_lease
from rft_platform.common.processes.spawn import StartError, start_detached, stop_holder, stop_process, wait_for_lease
from rft_platform.common.processes.strays import end_strays, lease_environment
from rft_platform.common.processes.usage import note_use
from rft_platform.config.gpu_placement import POLICY_ENGINE
from rft_platform.inference.client import HEARTBEAT_TIMEOUT_S, EngineClient
from rft_platform.inference.serving.chat_template import load_template
from rft_platform.inference.serving.lifecycle import EXIT_USER_ERROR
from rft_platform.inference.vllm_engine.server_settings import VllmOptions
from rft_platform.inference.vllm_engine.versions import installed_in, required_in

LEASE_FILE = "engine.json"
TRANSFORMERS_PACKAGE = "rft_platform.inference.transformers_engine"
VLLM_PACKAGE = "rft_platform.inference.vllm_engine"
Kind = Literal["auto", "transformers", "vllm"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TOOL_CALL_PARSERS = ("hermes",)  # of the transformers engine
REASONING_PARSERS = ("deepseek_r1", "qwen3")  # of the transformers engine: reasoning between <think> and </think>
PYTHON_VARIABLE = "RFT_VLLM_PYTHON"
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")  # present if a driver is loaded; importing torch would take seconds
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How an engine serves a model. An engine with other settings is not reused."""

    kind: Kind = "auto"
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 1
    idle_timeout_s: float = 900.0
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S  # the engine is ended if it answers no probe for this long
    max_model_len: int | None = None  # tokens; None: the model's own limit
    seed: int | None = None  # seed of requests that have none
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None  # separates reasoning from answers
    enable_thinking: bool | None = None  # a variable of the chat template
    chat_template: str | None = None  # a file, or the template's text
    max_batch_tokens: int | None = None  # bounds the memory of a batch; None: derived from the free memory
    python: str | None = None  # the interpreter that has vLLM; ``RFT_VLLM_PYTHON`` overrides this setting
    vllm: VllmOptions = field(default_factory=VllmOptions)


def find_or_start_engine(
    model_path: Path,
    home_leases: Path,
    home_logs: Path,
    spec: EngineSpec = EngineSpec(),
    *,
    name: str = POLICY_ENGINE,
    replica: int = 0,
    gpus: str | None = None,
    start_timeout_s: float = 600.0,
) -> EngineClient:
    """A healthy engine for ``model_path`` with the settings of ``spec``: the running engine of the lease, or a new one.

    A running engine with another model or other settings is ended first. A running engine serves the weights that were
    loaded last, and these may differ from those in ``model_path``: compare ``status().weights_digest`` and call
    ``update_weights``. Each ``replica`` 0, 1, ... of each ``name`` has its own lease and log (``engine.json``,
    ``engine-1.json``, ...). ``gpus`` is the process's CUDA_VISIBLE_DEVICES; None: the caller's value. Raises UserError
    for a folder or a setting that cannot be served, EngineError if the engine does not start.
    """
    check_model_folder(model_path)
    python = engine_python(spec.python)
    engine: dict[str, Any] = {
        "dtype": spec.dtype,
        "threads": spec.threads,
        "max_model_len": spec.max_model_len,
        "seed": spec.seed,
        "chat_template": load_template(spec.chat_template),
        "enable_thinking": spec.enable_thinking,
        "reasoning_parser": spec.reasoning_parser,
    }
    if check_engine(spec) == "vllm":
        package = VLLM_PACKAGE
        engine |= {"tool_call_parser": spec.tool_call_parser, "options": asdict(spec.vllm)}
    else:
        package, python = TRANSFORMERS_PACKAGE, sys.executable
        engine |= {"device": spec.device, "max_batch_tokens": spec.max_batch_tokens}
    stem = replica_name(replica, name)
    lease, log = home_leases / f"{stem}.json", home_logs / f"{stem}.log"
    start = _Launch(package, python, model_path.absolute(), lease, log, spec.idle_timeout_s, engine, gpus)
    with locked(start.lease, LOCK_TIMEOUT_S + start_timeout_s):  # another caller may be starting the engine
        note_use(start.lease)
        client = _find(start) or _start(start, start_timeout_s)
    client.heartbeat_timeout_s = spec.heartbeat_timeout_s
    return client


def engine_python(python: str | None) -> str:
    """The interpreter for vLLM: ``RFT_VLLM_PYTHON``, else ``python``, else the current one."""
    return str(os.environ.get(PYTHON_VARIABLE) or python or sys.executable)


def check_engine(spec: EngineSpec) -> Literal["transformers", "vllm"]:
    """The kind of engine that ``spec`` starts; UserError if it is not installed or lacks a parser of ``spec``."""
    python = engine_python(spec.python)
    chosen = resolve_kind(spec.kind, spec.device, python)
    if chosen == "vllm":
        spec.vllm.check()
        required_in(python)
    else:
        _check_parsers(spec.tool_call_parser, spec.reasoning_parser)
    return chosen


def _check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise UserError for a parser that the transformers engine does not have."""
    for key, given, known in (
        ("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if given not in (None, *known):
            raise UserError(
                f"explorer.rollout_model.{key} {given!r}: the transformers engine supports "
                f"{', '.join(known)}; use one of "
                "them, remove the key, or set engine.kind: vllm"
            )


def resolve_kind(kind: Kind, device: str, python: str) -> Literal["transformers", "vllm"]:
    """Resolve "auto": vLLM if there is a GPU and ``python`` has a GPU build of vLLM, else transformers."""
    if kind != "auto":
        return kind
    if device == "cpu" or not any(Path(file).exists() for file in GPU_FILES):
        return "transformers"
    found = installed_in(python)
    return "transformers" if found is None or found.for_cpu else "vllm"


def replica_name(replica: int, name: str = POLICY_ENGINE) -> str:
    """Stem of a replica's lease and log files."""
    return name if replica == 0 else f"{name}-{replica}"


@dataclass(frozen=True, slots=True)
class _Launch:
    """The requested engine process."""

    package: str
    python: str
    model_path: Path
    lease: Path
    log: Path
    idle_timeout_s: float
    engine: dict[str, Any]
    gpus: str | None

    def digest(self) -> str:
        """Digest of the settings and of the model's JSON and Jinja files; without the weights, because they change."""
        files = sorted([*self.model_path.glob("*.json"), *self.model_path.glob("*.jinja")])
        names = {file.name: digest_file(file) for file in files if not file.name.endswith(".index.json")}
        return digest_json([self.package, self.python, str(self.model_path), names, self.engine])

    def arguments(self) -> str:
        """The settings as the server's only command-line argument."""
        return json.dumps(
            {
                "lease": str(self.lease.absolute()),
                "model_digest": self.digest(),
                "idle_timeout_s": self.idle_timeout_s,
                "model_path": str(self.model_path),
                "engine": self.engine,
            }
        )


def check_model_folder(folder: Path) -> None:
    """Raise UserError unless ``folder`` holds a model's configuration, weights and tokenizer."""
    if not folder.is_dir():
        raise UserError(f"model folder {folder}: no such folder; give a folder with config.json, weights and tokenizer")
    try:
        config = read_json(folder / "config.json")
    except FileNotFoundError as error:
        raise UserError(f"model folder {folder}: has no config.json, so it is not a Hugging Face model") from error
    except ValueError as error:
        raise UserError(f"model folder {folder}: config.json is not valid JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"model folder {folder}: config.json names no model_type")
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"model folder {folder}: contains no .safetensors file; convert the weights to safetensors first"
        )
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UserError(
            f"model folder {folder}: has no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); "
            "save the model's tokenizer into it"
        )


def _find(launch: _Launch) -> EngineClient | None:
    """The engine that the lease names, if it matches ``launch`` and is healthy; an engine that does not is ended."""
    lease = read_lease(launch.lease)
    if lease is None:
        return None
    if is_alive(lease):
        client = EngineClient(lease)
        if lease.model_digest == launch.digest() and _answers(client):
            return client
        client.close()
        stop_holder(lease, STOP_TIMEOUT_S)
    remove_lease(launch.lease, lease.pid)
    return None


def _answers(client: EngineClient) -> bool:
    try:
        client.status()
    except EngineError:
        return False
    return True


def _start(launch: _Launch, timeout_s: float) -> EngineClient:
    threads = str(launch.engine["threads"])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "RAYON_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        **lease_environment(launch.lease),
    }
    if launch.package == VLLM_PACKAGE:
        environment["PYTHONPATH"] = path_of_package(launch.log.parent)
    if launch.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = launch.gpus
    end_strays(launch.lease, STOP_TIMEOUT_S)  # processes of a starter that was killed before it wrote the lease
    # -P: modules in the caller's working folder must not shadow those of the engine
    command = [launch.python, "-P", "-m", launch.package, launch.arguments()]
    process = start_detached(command, launch.log, environment)
    try:
        return EngineClient(wait_for_lease(launch.lease, process, timeout_s, launch.log))
    except StartError as error:
        if error.exit_code == EXIT_USER_ERROR:
            raise UserError(_last_line(launch.log)) from error
        stop_process(process, STOP_TIMEOUT_S)
        raise EngineError(f"the policy engine does not start: {error}") from error


def path_of_package(folder: Path) -> str:
    """PYTHONPATH for another environment's interpreter: it can import only this package from this environment."""
    link = folder / "path" / "rft_platform"
    package = Path(rft_platform.__file__).parent
    if not (link.is_symlink() and link.resolve() == package):
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_dir() and not link.is_symlink():  # the home was copied by a tool that follows links
            shutil.rmtree(link)
        fresh = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
        fresh.symlink_to(package)
        fresh.replace(link)
    return os.pathsep.join(filter(None, [str(link.parent.absolute()), os.environ.get("PYTHONPATH")]))


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else f"the engine could not start; its log {log} is empty"
