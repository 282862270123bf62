"""The processes of a vLLM engine: none outlives the server, however that ends."""

from pathlib import Path

import psutil
import pytest

from rft_platform.config.home import Home
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
from rft_platform.inference.vllm_engine.server_settings import VllmOptions

pytestmark = pytest.mark.slow


def test_no_process_survives_a_killed_server(tiny_model: Path, tmp_path: Path, vllm_python: Path) -> None:
    options = VllmOptions(kv_cache_gb=0.25, gpu_memory_utilization=0.2, enforce_eager=True)
    client = find_or_start_engine(
        tiny_model,
        Home(tmp_path).cluster,
        EngineSpec(kind="vllm", python=str(vllm_python), vllm=options),
    )
    server = psutil.Process(client.status().pid)
    family = [server, *server.children(recursive=True)]
    assert len(family) > 1
    server.kill()
    client.close()
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left
