"""Supported versions of vLLM, and the differences between its versions and builds.

This module imports only the standard library, because the launcher and the server's start use it too.
"""

import json
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.config.engine_choice import HOW_TO_INSTALL, Vllm, installed_in
from rft_platform.inference.http_contract import KEEP_ALIVE_S

OLDEST, NEWEST = (0, 24), (0, 32)  # those of the extra `gpu` in pyproject.toml
CPU_BATCH_TOKENS = 4096  # tokens computed in one step; vLLM's own default
#: Lines of vLLM's log during a start, and what it does from then on.
START_STAGES = {
    "Loading safetensors checkpoint shards:   0%": "loading the weights",
    "Model loading took": "preparing the model (the first start compiles it)",
    "Capturing CUDA graphs": "capturing CUDA graphs",
    "Graph capturing finished": "warming up",
}


def required_in(python: str) -> Vllm:
    """The vLLM of ``python``; UserError if there is none or its version is not supported."""
    found = installed_in(python)
    if found is None:
        raise UserError(f"engine.kind vllm: {python} has no vLLM; {HOW_TO_INSTALL}; or set engine.kind: transformers")
    check_version(found, python)
    return found


def check_version(vllm: Vllm, where: str) -> None:
    """Raise UserError unless the version is supported; ``where`` names the interpreter that has this vLLM."""
    if not OLDEST <= vllm.number <= NEWEST:
        first, last = (".".join(map(str, number)) for number in (OLDEST, NEWEST))
        raise UserError(
            f"vLLM {vllm.version} of {where} is not supported, expected version {first} to {last}; {HOW_TO_INSTALL}"
        )


def server_program(vllm: Vllm, model: str) -> list[str]:
    """Arguments of the interpreter that start vLLM's server for ``model``.

    They start the module of ``vllm serve``, because its console script is not reliable. This module needs the
    distribution "vllm". A build with another distribution name starts the server's module instead, although newer
    versions of vLLM call that module deprecated.
    """
    if vllm.distribution == "vllm":
        return ["-m", "vllm.entrypoints.cli.main", "serve", model]
    return ["-m", "vllm.entrypoints.openai.api_server", "--model", model]


def command_line(options: dict[str, Any]) -> list[str]:
    """``{"max_num_seqs": 8, "enforce_eager": True}`` as arguments; None omits an option, False negates it."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.lstrip("-").replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            arguments += [f"--{flag}", *map(str, value)]
        else:
            arguments += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments


def environment(vllm: Vllm, threads: int) -> dict[str, str]:
    """Environment variables that this build needs, where the user's environment has none of that name."""
    common = {
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # allows one position more than the model has; it is never computed
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles at run time; of no use for processed log-probs
    }
    cpu = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # A forked engine process need not import vLLM again (20 s); vLLM spawns it all the same where a fork is unsafe. The
    # CPU build's OpenMP threads do not survive a fork.
    cuda = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    return {**common, **(cpu if vllm.for_cpu else cuda)}


def resource_options(vllm: Vllm, settings: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """Options for memory, parallelism and compilation, by build."""
    if vllm.for_cpu:
        return {
            "kv_cache_memory_bytes": int(settings["kv_cache_gb"] * 2**30),
            "enforce_eager": True,
            # If a prompt is split into chunks, vLLM rewinds the random generator. A CPU generator does not support
            # this, so a seeded request would end the engine.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_BATCH_TOKENS, max_model_len),
        }
    return {
        "gpu_memory_utilization": settings["gpu_memory_utilization"],
        "tensor_parallel_size": settings["tensor_parallel_size"],
        "enforce_eager": settings["enforce_eager"],
        "enable_sleep_mode": settings["sleeps"] or None,
        # The policy has an adapter in nearly all requests: graphs without one would double the time to capture them.
        "compilation_config": {"cudagraph_specialize_lora": False} if settings["max_lora_rank"] else None,
    }


def dtype_of(vllm: Vllm, dtype: str, gpu_dtype: str) -> str:
    """Resolve "auto": float32 on a CPU, else ``gpu_dtype``. vLLM's own "auto" uses bfloat16 on a CPU too."""
    return dtype if dtype != "auto" else "float32" if vllm.for_cpu else gpu_dtype
