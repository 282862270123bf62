"""Dagster's storage in Postgres: asked for by the environment, and the password never leaves it."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import dagster as dg
import psutil
import pytest
import yaml
from sqlalchemy import create_engine, inspect, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from rft_platform.cluster.local.processes import stop_process
from rft_platform.common.errors import TransientError, UserError
from rft_platform.common.fault_classification import as_fault
from rft_platform.config.home import Home
from rft_platform.jobs.init_dagster_home import prepare
from rft_platform.jobs.instance import ensure_storage, open_instance, shipped_settings
from rft_platform.model_registry.mlflow_client import open_client
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.incoming import NewCall
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.online.traffic.writer import TrafficWriter
from tests.e2e.conftest import ProjectFolder, small_config
from tests.support.postgres import PASSWORD

VARIABLE = "RFT_DAGSTER_POSTGRES_URL"


@pytest.mark.slow
def test_without_the_variable_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    prepare(Home(tmp_path))
    assert VARIABLE not in (tmp_path / "dagster" / "dagster.yaml").read_text()


@pytest.mark.parametrize(
    "url", ["db.example/dagster", "postgresql://u:verysecret@h/d", "postgresql+psycopg2://u:verysecret@h:x/d"]
)
def test_a_url_that_cannot_be_one_is_refused_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv(VARIABLE, url)
    with pytest.raises(UserError, match=f"{VARIABLE} is not a Postgres URL with its driver") as refusal:
        open_instance(Home(tmp_path))
    assert "verysecret" not in str(refusal.value)


@pytest.mark.slow
def test_a_storage_that_was_settled_by_hand_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dagster_postgres", reason="needs dagster-postgres")
    monkeypatch.setenv(VARIABLE, "postgresql+psycopg2://rft:secret@127.0.0.1:1/none")
    settings = tmp_path / "dagster" / "dagster.yaml"
    settings.parent.mkdir()
    settings.write_text(f"storage:\n  sqlite:\n    base_dir: {tmp_path / 'elsewhere'}\n")
    with open_instance(Home(tmp_path)) as instance:
        assert instance.get_runs_count() == 0
    assert VARIABLE not in settings.read_text()


@pytest.fixture
def project(
    postgres: str,
    tmp_path: Path,
    tiny_model: Path,
    with_mlflow: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ProjectFolder]:
    """One small round, its runs in Postgres."""
    monkeypatch.setenv(VARIABLE, postgres)
    monkeypatch.setenv("RFT_LOG_FORMAT", "json")
    config = small_config(tmp_path, tiny_model)
    config["buffer"]["total_steps"] = 1
    file = tmp_path / "rft.yaml"
    file.write_text(yaml.safe_dump(config))
    project = ProjectFolder(tmp_path / "home", file)
    with_mlflow(project.home)
    yield project
    project.rft("stop", check=False)


@pytest.mark.slow
def test_a_round_and_the_sensors_work_on_postgres(project: ProjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    project.rft("run", "--config", str(project.config))
    home = Home(project.home)
    with open_instance(home) as instance:
        for storage in (instance.run_storage, instance.event_log_storage, instance.schedule_storage):
            assert type(storage).__module__.startswith("dagster_postgres")
        runs = instance.get_runs()
        assert sorted(run.job_name for run in runs) == ["explore_job", "sync_round_job", "warm_start_job"]
        assert {run.status for run in runs} == {dg.DagsterRunStatus.SUCCESS}
        assert instance.get_dynamic_partitions("rft_round") == ["r0001"]  # the budget has no second round
        assert instance.get_latest_materialization_event(dg.AssetKey("policy_checkpoint")) is not None
        _tick_sensors(project, instance)
        _logs_name_the_runs(home, {run.run_id: run.job_name for run in runs})
    assert not list(project.home.rglob("*.db-journal"))
    assert not (project.home / "dagster" / "history").exists()

    holders = [file for file in project.home.rglob("*") if file.is_file() and PASSWORD.encode() in file.read_bytes()]
    assert holders == []
    monkeypatch.delenv(VARIABLE)
    refused = project.rft("run", "--config", str(project.config), check=False)
    assert refused.returncode == 2
    assert f"{VARIABLE} is not set" in refused.stderr


@pytest.mark.slow
def test_a_closed_connection_and_a_missing_server_are_transient(postgres: str) -> None:
    engine, other = (create_engine(postgres, isolation_level="AUTOCOMMIT", poolclass=NullPool) for _ in range(2))
    with engine.connect() as connection, other.connect() as killer:
        process = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        killer.execute(text(f"SELECT pg_terminate_backend({process})"))
        with pytest.raises(OperationalError) as closed:
            connection.execute(text("SELECT 1"))
    address = urlsplit(postgres)
    with pytest.raises(OperationalError) as missing:
        create_engine(postgres.replace(f":{address.port}/", ":1/")).connect()
    for error in (closed.value, missing.value):  # without the frames of the test, which is user code
        assert type(as_fault(error.with_traceback(None))) is TransientError


@pytest.mark.slow
def test_mlflow_and_the_service_take_a_database_each_by_its_url(postgres: str) -> None:
    server = create_engine(postgres, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        for name in ("mlflow", "traffic"):
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
    server.dispose()
    mlflow, traffic = (postgres.removesuffix("postgres") + name for name in ("mlflow", "traffic"))
    open_client(mlflow).create_registered_model("a-model")
    assert [model.name for model in open_client(mlflow).search_registered_models()] == ["a-model"]
    service = open_database(traffic)
    assert service.dialect.name == "postgresql" and inspect(service).get_table_names()
    service.dispose()


@pytest.mark.slow
def test_each_part_limits_its_waits_for_the_server(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, postgres)
    (tmp_path / "dagster.yaml").write_text(shipped_settings())
    ensure_storage(tmp_path / "dagster.yaml")
    registry = ModelRegistry(postgres, None, "a-project", "a-model")
    for engine in (
        open_database(postgres), create_engine(os.environ[VARIABLE]), create_engine(registry.tracking_uri)
    ):  # fmt: skip
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None and driver.info.dsn_parameters["connect_timeout"] == "10"
            with socket.socket(fileno=os.dup(driver.fileno())) as end:
                options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
                values = [end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options]
            assert values == [30, 10, 3, 30_000]
        engine.dispose()


#: Passes connections to its port on to the Unix socket that it is given.
RELAY = """
import asyncio, sys

async def copy(source, target):
    while data := await source.read(65536):
        target.write(data)
        await target.drain()
    target.close()

async def serve(source, target):
    answers, requests = await asyncio.open_unix_connection(sys.argv[1])
    await asyncio.gather(copy(source, requests), copy(answers, target))

async def main():
    server = await asyncio.start_server(serve, "0.0.0.0", 5432)
    print("ready", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
_NEAR, _FAR = "10.231.77.1", "10.231.77.2"


@contextmanager
def far_server(url: str) -> Iterator[tuple[str, Callable[[str], None]]]:
    """The URL of the server on a host of its own, and a function that sets the link to this host ``up`` or ``down``.

    A network namespace is this host. A packet to it is lost while its link is down.
    """
    relay = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", RELAY, _socket_of(url)], stdout=subprocess.PIPE, text=True
    )
    near, far = f"rft{relay.pid}n", f"rft{relay.pid}f"

    def ip(command: str, inside: bool = False) -> None:
        prefix = ["nsenter", "--net", "--target", str(relay.pid)] if inside else []
        done = subprocess.run([*prefix, "ip", *command.split()], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs the right to create network namespaces and links: {done.stderr}")

    try:
        assert relay.stdout is not None
        if relay.stdout.readline() != "ready\n":
            pytest.skip("needs the right to create network namespaces")
        ip(f"link add {near} type veth peer name {far} netns {relay.pid}")
        ip(f"addr add {_NEAR}/30 dev {near}")
        ip(f"addr add {_FAR}/30 dev {far}", inside=True)
        ip(f"link set {near} up")
        ip(f"link set {far} up", inside=True)
        address = make_url(url).set(host=_FAR, port=5432)
        yield address.render_as_string(hide_password=False), lambda to: ip(f"link set {far} {to}", inside=True)
    finally:
        relay.kill()
        relay.communicate()


def _socket_of(url: str) -> str:
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        folder = connection.exec_driver_sql("SHOW unix_socket_directories").scalar_one()
    return f"{folder}/.s.PGSQL.{make_url(url).port}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recording_continues_after_the_server_vanished_without_closing_connections(postgres: str) -> None:
    with far_server(postgres) as (url, set_link):
        engine = open_database(url)
        writer = TrafficWriter(TrafficStore(engine))
        writer.record(NewCall("before", 0, {}, 1, 5, 0.0))
        _wait_until(lambda: writer.counts.recorded == 1, 30)
        set_link("down")
        writer.record(NewCall("meanwhile", 0, {}, 1, 5, 0.0))
        _wait_until(lambda: writer.counts.failures > 0, 75)
        set_link("up")
        _wait_until(lambda: writer.counts.recorded == 2, 60)
        assert writer.close() == 0
        engine.dispose()


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.1)


def _logs_name_the_runs(home: Home, jobs: dict[str, str]) -> None:
    """Driver, engine and trainer wrote JSON lines that belong to the runs in Postgres."""
    texts = {name: (home.logs / f"{name}.log").read_text() for name in ("driver", "engine", "trainer")}
    lines = [json.loads(line) for text in texts.values() for line in text.splitlines() if line.startswith("{")]
    places = {(line["process"], jobs[line["run_id"]], line["round"]) for line in lines if line["run_id"]}
    assert ("driver", "explore_job", "r0001") in places
    assert ("trainer", "sync_round_job", "r0001") in places
    assert ("engine", "sync_round_job", "r0001") in places


def _tick_sensors(project: ProjectFolder, instance: dg.DagsterInstance) -> None:
    """A real daemon, until the sensor that runs by default has ticked: its state and its ticks are in Postgres too."""
    workspace = Path(__file__).parents[2] / "workspace.yaml"
    environment = {**project.environment, "DAGSTER_HOME": str(project.home / "dagster"), "RFT_SENSOR_INTERVAL_S": "1"}
    log = project.home / "logs" / "daemon.log"
    with log.open("w") as stream:
        daemon = psutil.Popen(
            [sys.executable, "-m", "dagster._daemon", "run", "-w", str(workspace)],
            env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for_tick(instance, "alert_on_run_failure", daemon, log)
    finally:
        stop_process(daemon)
        daemon.wait(timeout=30)


def _wait_for_tick(instance: dg.DagsterInstance, sensor: str, daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert daemon.poll() is None, log.read_text()
        for state in instance.all_instigator_state():
            if state.instigator_name == sensor and instance.get_ticks(state.instigator_origin_id, state.selector_id):
                return
        time.sleep(0.2)
    pytest.fail(f"{sensor} has not ticked\n{log.read_text()}")
