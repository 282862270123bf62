"""Engines that somebody else runs: ``rft engine`` serves one, ``engine.urls`` uses it, and others are refused."""

import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
import yaml

from rft_platform.cluster.interface import tls_context
from rft_platform.cluster.local.processes import wait_until_ended
from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import EngineError, UserError, WeightsAbsentError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.config.resolve import resolve
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.launch.external import external_engine
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.object_store.mirror import open_mirror
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.connections import check_engines, connect_engine
from tests.support import hidden_folder
from tests.support.ports import free_port

TOKEN = "a-token-of-24-characters"
Configure = Callable[..., Project]


@pytest.fixture
def configure(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """``configure(*urls)``: the project that uses these engines."""
    monkeypatch.setenv("ENGINE_TOKEN", TOKEN)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')

    def make(*urls: str, model: Path = tiny_model) -> Project:
        file = tmp_path / "rft.yaml"
        engine = {"device": "cpu", "kind": "transformers", "urls": list(urls), "token_env": "ENGINE_TOKEN"}
        sections = {
            "project": "apart", "name": "one", "model": {"model_path": str(model)}, "engine": engine,
            "explorer": {"rollout_model": {"engine_num": max(len(urls), 1)}},
            "buffer": {"explorer_input": {"taskset": {"path": str(tmp_path / "tasks.jsonl")}}},
        }  # fmt: skip
        file.write_text(yaml.safe_dump(sections))
        return Project(Home(tmp_path / "home"), load_config(file))

    return make


@pytest.fixture
def serve(configure: Configure, tmp_path: Path) -> Iterator[Callable[..., tuple[str, psutil.Popen]]]:
    """``serve()``: address and process of a further ``rft engine``, which does not see the folder ``hidden``."""
    started: list[psutil.Popen] = []

    def start(hidden: Path | None = None) -> tuple[str, psutil.Popen]:
        configure()
        port = free_port()
        command = [sys.executable, "-m", "rft_platform", "engine", "--config", str(tmp_path / "rft.yaml")]
        if hidden is not None:
            command = [sys.executable, hidden_folder.__file__, str(hidden), *command]
        process = psutil.Popen(
            [*command, "--port", str(port), "--token-env", "ENGINE_TOKEN"],
            env={**os.environ, "RFT_HOME": str(tmp_path / "there")}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        started.append(process)
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
        while True:
            try:
                external_engine(url, TOKEN).close()
                return url, process
            except EngineError:
                if process.poll() == hidden_folder.REFUSED:
                    pytest.skip("this user may not mount file systems")
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)

    yield start
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait()


class StockServer(BaseHTTPRequestHandler):
    """Answers like an OpenAI server without the platform's control plane."""

    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.slow
def test_two_external_engines_form_a_pool_and_a_lost_one_is_named(
    configure: Configure, serve: Callable[..., tuple[str, psutil.Popen]], tiny_model: Path, tmp_path: Path
) -> None:
    (first, kept), (second, lost) = serve(), serve()
    project = configure(first, second)
    check_engines(project)
    with connect_engine(project) as pool:  # type: ignore[attr-defined]
        assert isinstance(pool, EnginePool)
        pool.update_weights(tiny_model, 4)
        assert pool.status().policy_version == 4
        assert not (tmp_path / "home").exists(), "no process of this project was started"
        lost.kill()
        assert wait_until_ended([lost], 20) == []
        prompts = [[1, 2, 3 + n] for n in range(8)]
        assert len(pool.generate(prompts, SamplingParams(4, seed=1))) == 8
        assert pool.status().policy_version == 4  # asks both
        (reason,) = pool.replicas.down().values()
        assert second in reason
    kept.terminate()  # as a container is ended
    assert wait_until_ended([kept], 30) == []
    with pytest.raises(UserError, match=f"engine.urls {first}: the engine does not answer.*rft engine"):
        check_engines(project)


@pytest.mark.slow
def test_an_engine_on_a_machine_that_does_not_see_the_home_fetches_weights(
    serve: Callable[..., tuple[str, psutil.Popen]], tiny_model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    folder = Path(shutil.copytree(tiny_model, home / "checkpoints" / "policy" / "global_step_1"))
    (folder / "trainer_state").mkdir()
    (folder / "trainer_state" / "optimizer.safetensors").write_bytes(b"moments")
    url, _ = serve(hidden=home)
    with EngineClient(url, token=TOKEN) as engine:
        with pytest.raises(WeightsAbsentError, match=f"{url} does not see {folder}") as refused:
            engine.update_weights(folder, 1)
        assert "set store_url" in refused.value.hint and engine.status().policy_version == 0
        open_mirror(home, f"file://{tmp_path}/store").take_over()
        for version in (1, 2):
            engine.update_weights(folder, version)
            status = engine.status()
            assert (status.policy_version, status.weights_path) == (version, str(folder))
            assert status.weights_digest == digest_weights(folder)
    stored = [path.name for path in (tmp_path / "store" / "files").rglob("*") if path.is_file()]
    assert not [name for name in stored if "optimizer" in name], "an engine does not wait for the trainer's state"


class Deviating(EngineClient):
    """A client of an engine whose log-probs are wrong."""

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """The log-probs of the engine, each too large."""
        return [[logprob + 0.5 for logprob in row] for row in super().score(sequences)]


@pytest.mark.slow
def test_an_external_engine_that_fails_the_comparison_is_named_and_not_ended(
    serve: Callable[..., tuple[str, psutil.Popen]],
) -> None:
    (first, kept), (second, refused) = serve(), serve()
    wrong = Deviating(second, token=TOKEN)

    def deviating(number: int) -> EngineClient:
        return wrong

    with EnginePool({0: EngineClient(first, token=TOKEN), 1: EngineClient(second, token=TOKEN)}, deviating) as pool:
        processes = {client.url: client.status() for client in (wrong, pool.replicas.serving()[0].client)}
        assert pool.status().cpu_seconds > 0  # the pool knows the log-probs of its weights
        pool.replicas.mark_down(pool.replicas.serving()[1], "lost")
        deadline = time.monotonic() + 60
        while "could not be restarted" not in (reason := pool.replicas.down()[1]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert second in reason and "log-probs differ" in reason
        assert wrong.status().paused, "nobody uses it before a check"
        pool.shutdown()
        wrong.shutdown()
        for client in (wrong, pool.replicas.serving()[0].client):
            assert client.status().pid == processes[client.url].pid
    assert kept.poll() is None and refused.poll() is None


@pytest.mark.slow
def test_another_model_and_a_wrong_token_are_refused(
    configure: Configure, serve: Callable[..., tuple[str, psutil.Popen]], tiny_model: Path, tmp_path: Path
) -> None:
    url, _ = serve()
    other = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    (other / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match=f"engine.urls {url}: serves another model: .* serve that folder there"):
        check_engines(configure(url, model=other))
    with pytest.raises(UserError, match=r"refused \(401\).*correct engine.token_env"):
        external_engine(url, "wrong")
    with EngineClient(url, token=TOKEN) as engine:
        assert engine.status().model_path == str(tiny_model)


def test_a_server_without_the_control_plane_is_refused_with_the_reason(configure: Configure) -> None:
    server = HTTPServer(("127.0.0.1", 0), StockServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(
            UserError, match=r"no control plane .* cannot change weights, like a stock vLLM; .*rft engine"
        ):
            check_engines(configure(url))
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")
def test_an_engine_with_a_certificate_of_a_private_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {certificate} -subj /CN=localhost"
    subprocess.run([*made.split(), "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = HTTPServer(("127.0.0.1", 0), StockServer)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://localhost:{server.server_port}"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    tls_context.cache_clear()
    try:
        with pytest.raises(UserError, match="has no control plane"):
            external_engine(url, TOKEN)
        with pytest.raises(EngineError, match=r"refuses status \(404\)"), EngineClient(url, token=TOKEN) as client:
            client.status()
        tls_context.cache_clear()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
        with pytest.raises(UserError, match=r"SSL_CERT_FILE .*none\.pem"):
            tls_context()
    finally:
        tls_context.cache_clear()
        server.shutdown()
        server.server_close()


class LoginPage(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>log in</html>")

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_server_that_answers_with_something_else_is_refused(configure: Configure) -> None:
    server = HTTPServer(("127.0.0.1", 0), LoginPage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(UserError, match=f"engine.urls {url} is not an engine of this version"):
            check_engines(configure(url))
        with pytest.raises(UserError, match="is not an engine of this version"), EngineClient(url) as client:
            client.status()
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://localhost:port", "http://[::1", "https://:8000", " http://h:1"]
)
def test_an_address_that_is_no_url_is_refused(configure: Configure, url: str) -> None:
    found = settings_findings(resolve(configure(url).config), Machine(2, 0))
    assert [f.text for f in found if "engine.urls" in f.text] == [
        f"engine.urls {url}: expected http://HOST:PORT or https://HOST:PORT"
    ]


def test_an_engine_that_cannot_be_reached_and_a_missing_token_are_refused(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"engine.urls {url}: the engine does not answer"):
        check_engines(configure(url))
    monkeypatch.setenv("ENGINE_TOKEN", "a-töken-of-24-characters")
    with pytest.raises(UserError, match=r"engine.token_env ENGINE_TOKEN: the token has a character that is not ASCII"):
        check_engines(configure(url))
    monkeypatch.delenv("ENGINE_TOKEN")
    with pytest.raises(UserError, match=r"engine.token_env ENGINE_TOKEN: this environment variable is not set"):
        check_engines(configure(url))
