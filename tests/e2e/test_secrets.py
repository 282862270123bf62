"""Secrets in errors of user code reach neither the terminal nor a byte of the home, which its owner alone can read."""

import json
import stat
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HELPER_KEY, HELPER_ACCESS = "VARIABLEsecret4444", "ACCESSsecret55555"
SECRETS = ("QUERYsecret1", "URLsecret22", "BEARERsecret333", HELPER_KEY, "0123456789abcdefSHAPE", HELPER_ACCESS)


@pytest.fixture(scope="module")
def refusing_endpoint() -> Iterator[str]:
    """An OpenAI endpoint that refuses every key and, as real ones do, repeats it in its answer."""

    class Refuse(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            key = self.headers["authorization"].removeprefix("Bearer ")
            body = json.dumps({"error": {"message": f"Incorrect API key provided: {key}", "code": "invalid_api_key"}})
            self.send_response(401)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_secrets_in_errors_leave_no_trace(make_project, refusing_endpoint: str) -> None:
    functions = {"workflow": "leaky_code:solve", "judge": "leaky_code:judge"}
    helper = {"name": "helper", "base_url": refusing_endpoint, "model": "m", "api_key_env": "HELPER_ACCESS"}
    project = make_project("leaky", explorer={"max_retry_times": 0, "group_policy": "drop", "eval_on_startup": False,
                                              "auxiliary_models": [helper]})  # fmt: skip
    edit(project.config, functions)
    project.home.chmod(0o755)
    environment = {**project.environment, "HELPER_KEY": HELPER_KEY, "HELPER_ACCESS": HELPER_ACCESS}
    command = project.command("run", "--config", str(project.config), "--rounds", "1")

    failed = subprocess.run(
        command, env={**environment, "LEAKY_JUDGE": "1"}, capture_output=True, text=True, timeout=500, check=False
    )
    assert failed.returncode == 1, failed.stderr
    assert "judge cannot log in" in failed.stderr, "the cause itself is told"
    leaks(project.home, failed.stdout + failed.stderr)

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert "agent cannot log in" in json.dumps(project.note(1, "explore")["errors"])
    assert "Incorrect API key" in json.dumps(project.note(1, "explore")["errors"])
    leaks(project.home, done.stdout + done.stderr)

    paths = [path for path in [project.home, *project.home.rglob("*")] if not path.is_symlink()]
    assert [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def edit(config: Path, functions: dict[str, str]) -> None:
    """Let every taskset have the leaky functions."""
    import yaml

    data = yaml.safe_load(config.read_text())
    inputs = data["buffer"]["explorer_input"]
    for taskset in (inputs["taskset"], *inputs["eval_tasksets"]):
        taskset.update(functions)
    config.write_text(yaml.safe_dump(data))


def leaks(home: Path, printed: str) -> None:
    """Assert that no secret was printed or stands in any file: databases, their write-ahead logs, Parquet, logs."""
    found = [("terminal", secret) for secret in SECRETS if secret in printed]
    for file in home.rglob("*"):
        if not file.is_file():
            continue
        content = file.read_bytes()
        if file.suffix == ".parquet":  # compressed
            content += str(pq.read_table(file).to_pylist()).encode()
        found += [(str(file.relative_to(home)), secret) for secret in SECRETS if secret.encode() in content]
    assert found == []
