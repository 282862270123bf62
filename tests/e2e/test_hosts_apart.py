"""Service and training as commands on two hosts, which share only a folder and a database.

Each host has its own home, and where the machine permits it its own network and process namespace: a port, a pid or a
lease of the other host cannot be used by mistake.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import create_engine, make_url

from rft_platform.config.home import Home
from rft_platform.online.project import open_project
from rft_platform.online.releases.shared_place import EXCHANGE_KEY
from rft_platform.online.traffic.database import CONSUMED
from rft_platform.online.traffic.project_traffic import traffic_store
from rft_platform.recipes.recipe import recipe_named
from rft_platform.rounds.project.record import published
from tests.deploy.conftest import postgres  # noqa: F401
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
REPOSITORY = Path(__file__).parents[2]
PRINTED = Path(__file__).parents[1] / "config" / "data"
RFT = [sys.executable, "-P", "-m", "rft_platform"]
_NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--mount-proc"]
_START_S, _UPDATE_S = 300.0, 900.0  # on a busy machine, half a minute passes between two launches


def has_namespaces() -> bool:
    """Whether this machine can start processes that have their own network and process ids."""
    try:
        return subprocess.run([*_NAMESPACES, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Host:
    """One host: its home, its configuration file and its command."""

    def __init__(self, folder: Path, name: str, apart: bool) -> None:
        self.home = Home(folder / name)
        self.file = folder / f"{name}.yaml"
        self.log = folder / f"{name}.log"
        self._apart = apart
        self.environment = {
            **os.environ, "RFT_HOME": str(self.home.root), "RFT_SENSOR_INTERVAL_S": "1", "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1", EXCHANGE_KEY: "the key of both hosts, 32 characters",
        }  # fmt: skip
        self._process: psutil.Process | None = None

    @contextmanager
    def running(self, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Run ``rft serve`` during the block."""
        command = [*RFT, "serve", "--config", str(self.file), *options]
        if self._apart:
            command = [*_NAMESPACES, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
        with self.log.open("a") as output:
            started = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            if self._apart:
                (self._process,) = until(lambda: psutil.Process(started.pid).children(), 30, [self])
            yield started
        finally:
            with suppress(psutil.NoSuchProcess):
                (self._process or started).terminate()
            started.wait(60)
            if not self._apart:  # the processes of a namespace end with its first one
                subprocess.run([*RFT, "stop"], env=self.environment, timeout=60, check=True)

    def inside(self, command: list[str]) -> list[str]:
        """The command, in the network of this host."""
        return command if self._process is None else ["nsenter", "--net", "--target", str(self._process.pid), *command]


def until(found: Callable[[], Any], seconds: float, hosts: list[Host]) -> Any:
    """The first true value of ``found``."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        logs = "\n".join(host.log.read_text() for host in hosts if host.log.exists())
        assert time.monotonic() < deadline, logs
        time.sleep(0.5)
    return value


def answers(host: Host, url: str) -> bool:
    """Whether the service of a host answers a health check in its network."""
    program = "import sys, httpx; sys.exit(not httpx.get(sys.argv[1], trust_env=False).is_success)"
    return (
        subprocess.run(host.inside([sys.executable, "-c", program, f"{url}/health"]), capture_output=True).returncode
        == 0
    )


def by_socket(url: str) -> str:
    """The URL of a PostgreSQL server by its Unix socket, which processes of other networks reach as well."""
    engine = create_engine(url)
    with engine.connect() as connection:
        folder = connection.exec_driver_sql("SHOW unix_socket_directories").scalar_one()
    engine.dispose()
    address = make_url(url)
    return f"postgresql+psycopg2://{address.username}@/{address.database}?host={folder}&port={address.port}"


def test_traffic_of_one_host_is_trained_on_another_and_served_again(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = request.getfixturevalue("postgres")
    monkeypatch.setenv("PGPASSWORD", str(make_url(server).password))  # a stored configuration must not hold it
    database = by_socket(server)
    apart = has_namespaces()
    serving, training = Host(tmp_path, "explorer", apart), Host(tmp_path, "trainer", apart)
    recipe_named("front-desk").write(tmp_path / "recipe")
    shared = tmp_path / "shared"
    shared.mkdir()
    port = 8010 if apart else free_port()
    changes = {
        "CHECKPOINT_ROOT_DIR": str(shared),
        "/path/to/your/model": str(tmp_path / "recipe" / "model"),
        "# path: your_db_url": f"path: {database}",
        "proxy_port: 8010": f"proxy_port: {port}",
        "max_response_tokens: 2048": "max_response_tokens: 8",  # of the tiny model, which does not end its answers
    }
    for host in (serving, training):
        text = (PRINTED / f"{host.file.stem}_service.yaml").read_text()
        for printed, own in changes.items():
            text = text.replace(printed, own)
        host.file.write_text(text)
    url, hosts = f"http://127.0.0.1:{port}", [serving, training]
    ports = ["--port", str(free_port()), "--mlflow-port", str(free_port())]
    with ExitStack() as stack:
        service = stack.enter_context(serving.running())
        until(lambda: service.poll() is not None or answers(serving, url), _START_S, hosts)
        assert service.poll() is None, serving.log.read_text()
        trainer = stack.enter_context(training.running(*ports))
        talk = serving.inside([sys.executable, "-m", customers_module(), url, "1", str(_UPDATE_S)])
        talked = subprocess.run(talk, capture_output=True, text=True, timeout=_UPDATE_S + 60, cwd=REPOSITORY)
        logs = "\n".join(host.log.read_text() for host in hosts)
        assert talked.returncode == 0, talked.stderr + logs
        assert (service.poll(), trainer.poll()) == (None, None), logs
    tally = json.loads(talked.stdout)
    versions = sorted(map(int, tally["answers"]))
    assert tally["failures"] == [] and versions[0] == 0 and len(versions) >= 2, logs
    on_a, on_b = open_project(serving.home), open_project(training.home)
    assert (on_a.config.mode, on_b.config.mode) == ("serve", "train")
    rounds = [number for number in on_a.store.rounds() if published(on_a.store, number) is not None]
    for number in rounds:
        here, there = published(on_a.store, number), published(on_b.store, number)
        assert here is not None and there is not None
        assert (here.policy_version, here.weights_digest) == (there.policy_version, there.weights_digest)
    assert not any(on_a.home.rounds.rglob("*.parquet"))
    consumed = [call for call in traffic_store(on_b).calls(tally["rated"]) if call.state == CONSUMED]
    assert len(consumed) >= 32
    assert not list(on_a.home.leases.glob("trainer*")) and not list(on_b.home.leases.glob("engine.json"))


def customers_module() -> str:
    """The module of the customers' process."""
    from tests.e2e import customers_of_a_host

    return customers_of_a_host.__name__
