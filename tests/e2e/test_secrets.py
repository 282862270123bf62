"""Secrets in errors of user code reach neither the terminal nor a byte of the home, which its owner alone can read."""

import json
import sqlite3
import stat
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
from interface import running_ui, wait_for

from rft_platform.assets.run_failure import CAUSE_TAG
from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance

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


@pytest.fixture
def make_leaky(make_project, refusing_endpoint: str):
    """Make a project whose workflow and judge raise errors with secrets in their text."""

    def make(name: str) -> Any:
        functions = {"workflow": "leaky_code:solve", "judge": "leaky_code:judge"}
        helper = {"name": "helper", "base_url": refusing_endpoint, "model": "m", "api_key_env": "HELPER_ACCESS"}
        project = make_project(name, explorer={"max_retry_times": 0, "group_policy": "drop", "eval_on_startup": False,
                                               "auxiliary_models": [helper]})  # fmt: skip
        edit(project.config, functions)
        return project

    return make


def test_secrets_in_errors_are_stored_nowhere(make_leaky) -> None:
    project = make_leaky("leaky")
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


def test_secrets_in_errors_are_stored_nowhere_under_the_daemon(make_leaky, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_leaky("leaky-daemon")
    for name, value in {"HELPER_KEY": HELPER_KEY, "HELPER_ACCESS": HELPER_ACCESS, "LEAKY_JUDGE": "1"}.items():
        monkeypatch.setenv(name, value)  # of `rft ui`, its daemon and the run workers
    failed = dg.RunsFilter(job_name="explore_job", statuses=[dg.DagsterRunStatus.FAILURE])
    with running_ui(project, "--auto") as ui, open_instance(Home(project.home)) as instance:
        run = wait_for(lambda: instance.get_runs(failed), "the daemon's run fails", 240)[0]
        cause = wait_for(lambda: ui.tags(run.run_id).get(CAUSE_TAG), "the cause is recorded", 30)
        events = "".join(map(str, instance.all_logs(run.run_id)))
        time.sleep(3)  # some sensor ticks more, which name the failure
    assert "judge cannot log in" in cause, "the cause itself is told"
    assert "judge cannot log in" in events
    assert "agent cannot log in" in json.dumps(project.note(1, "explore")["errors"])
    leaks(project.home, cause + events)


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
        if content.startswith(b"SQLite format 3"):  # a long text lies in several pages
            content += database_text(file)
        found += [(str(file.relative_to(home)), secret) for secret in SECRETS if secret.encode() in content]
    assert found == []


def database_text(file: Path) -> bytes:
    """The values of all rows; those that are compressed, as Dagster's snapshots are, also decompressed."""
    found = []
    with closing(sqlite3.connect(file)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = [row for name in names for row in database.execute(f'SELECT * FROM "{name}"')]
    for value in (value for row in rows for value in row if isinstance(value, str | bytes)):
        raw = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        found.append(raw)
        if raw[:1] == b"x":
            with suppress(zlib.error):
                found.append(zlib.decompress(raw))
    return b"\n".join(found)
