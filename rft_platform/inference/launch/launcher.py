"""The declaration of an engine as a service, and what is checked before it starts."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rft_platform.cluster.interface import Bundle, Cluster, Service, StartError
from rft_platform.cluster.local.service_process import EXIT_USER_ERROR
from rft_platform.common.errors import EngineError, UserError
from rft_platform.common.files import digest_json, read_json
from rft_platform.config.engine_choice import Kind, engine_python, resolve_kind
from rft_platform.config.gpu_placement import POLICY_ENGINE, gpu_count
from rft_platform.config.schema.explorer import AUTO_PARSER
from rft_platform.inference.client import HEARTBEAT_TIMEOUT_S, EngineClient
from rft_platform.inference.serving.weight_files import model_digest
from rft_platform.inference.vllm_engine.server_settings import VllmOptions
from rft_platform.inference.vllm_engine.versions import START_STAGES, required_in
from rft_platform.openai_api.templates import load_template

PACKAGES = {
    "transformers": "rft_platform.inference.transformers_engine",
    "vllm": "rft_platform.inference.vllm_engine",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TOOL_CALL_PARSERS = ("hermes",)  # of the transformers engine
REASONING_PARSERS = ("deepseek_r1", "qwen3")  # of the transformers engine: reasoning between <think> and </think>
_END_OF_REASONING = "</think>"
START_TIMEOUT_S, STOP_TIMEOUT_S = 600.0, 15.0


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
    reasoning_parser: str | None = None  # separates reasoning from answers; AUTO_PARSER: the tokenizer decides
    enable_thinking: bool | None = None  # a variable of the chat template
    chat_template: str | None = None  # a file, or the template's text
    max_batch_tokens: int | None = None  # bounds the memory of a batch; None: derived from the free memory
    python: str | None = None  # the interpreter that has vLLM; ``RFT_VLLM_PYTHON`` overrides this setting
    vllm: VllmOptions = field(default_factory=VllmOptions)


def find_or_start_engine(
    model_path: Path,
    cluster: Cluster,
    spec: EngineSpec = EngineSpec(),
    *,
    name: str = POLICY_ENGINE,
    replica: int = 0,
    gpus: str | None = None,
    reserved_gpus: float = 0.0,
) -> EngineClient:
    """A healthy engine for ``model_path`` with the settings of ``spec``: the running one, or a new one.

    A running engine with another model or other settings is ended first. A running engine serves the weights that were
    loaded last, and these may differ from those in ``model_path``: compare ``status().weights_digest`` and call
    ``update_weights``. Each ``replica`` 0, 1, ... of each ``name`` is a separate service (``engine``, ``engine-1``,
    ...). Raises UserError for a folder or a setting that cannot be served, EngineError if the engine does not start.

    ``gpus``: CUDA_VISIBLE_DEVICES of the process; None keeps the caller's. On a cluster of several machines leave it
    None: the cluster assigns ``reserved_gpus`` GPUs.
    """
    try:
        address = cluster.ensure(engine_service(model_path, spec, replica_name(replica, name), gpus, reserved_gpus))
    except StartError as error:
        if error.exit_code == EXIT_USER_ERROR:
            raise UserError(error.last_line.removeprefix("error: ") or str(error)) from error
        raise EngineError(f"the policy engine does not start: {error}") from error
    return EngineClient(address, cluster, heartbeat_timeout_s=spec.heartbeat_timeout_s)


def engine_service(
    model_path: Path, spec: EngineSpec, name: str, gpus: str | None = None, reserved_gpus: float = 0.0
) -> Service:
    """The declaration of an engine. Raises UserError for a folder or a setting that cannot be served.

    Its digest covers the settings and the model's JSON and Jinja files; not the weights, because they change.
    """
    check_model_folder(model_path)
    folder, kind = model_path.absolute(), check_engine(spec)
    engine: dict[str, Any] = {
        "dtype": spec.dtype,
        "threads": spec.threads,
        "max_model_len": spec.max_model_len,
        "seed": spec.seed,
        "chat_template": load_template(spec.chat_template),
        "enable_thinking": spec.enable_thinking,
        "reasoning_parser": _reasoning_parser(spec.reasoning_parser, folder),
    }
    if kind == "vllm":
        python = engine_python(spec.python)
        engine |= {"tool_call_parser": spec.tool_call_parser, "options": asdict(spec.vllm)}
    else:
        python = sys.executable
        engine |= {"device": spec.device, "max_batch_tokens": spec.max_batch_tokens}
    return Service(
        name,
        PACKAGES[kind],
        (json.dumps({"model_path": str(folder), "engine": engine}),),
        digest=digest_json([kind, python, str(folder), model_digest(folder), engine]),
        python=python,
        env={"TOKENIZERS_PARALLELISM": "false"},
        bundle=Bundle(spec.threads, gpus, reserved_gpus),
        idle_timeout_s=spec.idle_timeout_s,
        start_timeout_s=START_TIMEOUT_S,
        grace_s=STOP_TIMEOUT_S,
        stages=START_STAGES if kind == "vllm" else {},
    )


def check_engine(spec: EngineSpec) -> Literal["transformers", "vllm"]:
    """The kind of engine that ``spec`` starts; UserError if it is not installed or lacks a parser of ``spec``."""
    chosen = resolve_kind(spec.kind, spec.device, spec.python, gpu_count())
    if chosen == "vllm":
        spec.vllm.check()
        required_in(engine_python(spec.python))
    else:
        _check_parsers(spec.tool_call_parser, spec.reasoning_parser)
    return chosen


def _check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise UserError for a parser that the transformers engine does not have."""
    for key, given, known in (
        ("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS),
        ("reasoning_parser", reasoning_parser, (*REASONING_PARSERS, AUTO_PARSER)),
    ):
        if given not in (None, *known):
            raise UserError(
                f"explorer.rollout_model.{key} {given!r}: the transformers engine supports "
                f"{', '.join(known)}; use one of "
                "them, remove the key, or set engine.kind: vllm"
            )


def _reasoning_parser(given: str | None, folder: Path) -> str | None:
    """The parser that ``given`` means; vLLM refuses one for a model whose tokenizer has no end-of-reasoning token."""
    if given != AUTO_PARSER:
        return given
    tokenizer = folder / "tokenizer.json"
    thinks = tokenizer.is_file() and _END_OF_REASONING in tokenizer.read_text(encoding="utf-8")
    return REASONING_PARSERS[0] if thinks else None


def replica_name(replica: int, name: str = POLICY_ENGINE) -> str:
    """Stem of a replica's lease and log files."""
    return name if replica == 0 else f"{name}-{replica}"


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
