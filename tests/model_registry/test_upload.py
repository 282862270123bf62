"""Weights on an MLflow server: another machine, which has only the server's address, loads and serves the champion."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from rft_platform.model_registry.mlflow_client import open_client
from rft_platform.model_registry.mlflow_model import MLMODEL, describe_checkpoint, upload_model
from rft_platform.model_registry.models import UPLOADED_TAG, ModelRegistry
from tests.support.ports import free_port

pytestmark = pytest.mark.slow
QUESTION = "2 + 3 ="
LOAD = f"""
import mlflow
pipeline = mlflow.transformers.load_model("models:/helper@champion")
prompt = [{{"role": "user", "content": "{QUESTION}"}}]
print("answer", repr(pipeline(prompt, max_new_tokens=4, do_sample=False)[0]["generated_text"][-1]["content"]))
"""


@pytest.fixture
def checkpoint(tiny_model: Path, tmp_path: Path) -> Path:
    """A checkpoint as a training publishes it."""
    folder = tmp_path / "home" / "checkpoints" / "global_step_4"
    shutil.copytree(tiny_model, folder)
    (folder / "manifest.json").write_text("{}")
    (folder / "trainer_state").mkdir()
    (folder / "trainer_state" / "optimizer.safetensors").write_bytes(b"moments")
    return folder


def register(server: str, checkpoint: Path, limit: float = 1e9) -> tuple[ModelRegistry, str, int]:
    registry = ModelRegistry(server, None, "shop", "helper", upload_max_bytes=limit)
    run = registry.training_run("first")
    tags = {"weights_digest": "d" * 64}
    return registry, run.run_id, registry.register_checkpoint(checkpoint, 4, tags, run.run_id)


def elsewhere(server: str, folder: Path) -> dict[str, str]:
    """The environment of another user on another machine."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    folders = {"HOME": str(folder), "TMPDIR": str(folder)}
    return folders | {"PATH": path, "MLFLOW_TRACKING_URI": server, "HF_HUB_OFFLINE": "1"}


def test_another_machine_loads_and_serves_the_champion(mlflow_server: str, checkpoint: Path, tmp_path: Path) -> None:
    registry, run_id, version = register(mlflow_server, checkpoint)
    registry.promote(version)
    assert registry.resolve("models:/helper@champion").tags[UPLOADED_TAG] == "True"
    uploaded = open_client(mlflow_server).list_artifacts(run_id, "checkpoints/global_step_4")
    assert MLMODEL in {Path(file.path).name for file in uploaded}
    assert [file.name for file in checkpoint.parent.iterdir()] == ["global_step_4"], "no temporary files stay"
    assert not {"manifest.json", "trainer_state"} & {Path(file.path).name for file in uploaded}
    shutil.rmtree(tmp_path / "home")  # the other machine does not have it

    folder = tmp_path / "elsewhere"
    folder.mkdir()
    environment = elsewhere(mlflow_server, folder)
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert loaded.returncode == 0, loaded.stderr
    assert "answer '" in loaded.stdout
    port = free_port()
    arguments = ["-m", "mlflow", "models", "serve", "--model-uri", "models:/helper@champion", "--env-manager", "local"]
    command = [sys.executable, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    log = (folder / "serve.log").open("w")
    with log:
        serving = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
            (answer,) = asked(f"http://127.0.0.1:{port}/invocations", body, serving, folder / "serve.log")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(serving.pid, signal.SIGKILL)
            serving.wait()
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["model"] == "global_step_4", "no path of the machine that trained"


def asked(url: str, body: dict[str, object], server: "subprocess.Popen[bytes]", log: Path) -> list[dict[str, list]]:
    """The answer of a server that is starting."""
    deadline = time.monotonic() + 240
    while True:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        with suppress(httpx.HTTPError):
            response = httpx.post(url, json=body, timeout=60)
            assert response.status_code == 200, response.text
            return list(response.json())
        time.sleep(0.2)


def test_what_is_too_large_or_has_no_weights_is_not_uploaded(mlflow_server: str, checkpoint: Path) -> None:
    registry, run_id, _ = register(mlflow_server, checkpoint, limit=1000)
    (version,) = registry.versions()
    assert version.tags[UPLOADED_TAG] == "False" and version.folder == checkpoint
    assert open_client(mlflow_server).list_artifacts(run_id, "checkpoints") == []
    (checkpoint / "model.safetensors").unlink()
    client = open_client(mlflow_server)
    assert not upload_model(client, run_id, checkpoint, "checkpoints/global_step_4", 1e9)


def test_a_repeated_upload_sends_nothing_and_an_incomplete_one_is_completed(
    mlflow_server: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = open_client(mlflow_server)
    run_id = ModelRegistry(mlflow_server, None, "shop", "helper").training_run("first").run_id
    path = "checkpoints/global_step_4"
    describe_checkpoint(checkpoint)
    client.log_artifact(run_id, str(checkpoint / "config.json"), path)  # killed before its end
    assert upload_model(client, run_id, checkpoint, path, 1e9)
    assert MLMODEL in {Path(file.path).name for file in client.list_artifacts(run_id, path)}
    (checkpoint / "python_env.yaml").unlink()  # a second upload would fail
    assert upload_model(client, run_id, checkpoint, path, 1e9)
    assert not upload_model(client, run_id, checkpoint, "checkpoints/other", 1e9)
    assert "was not uploaded to MLflow" in caplog.text and "registry.upload_max_gb: 0" in caplog.text
