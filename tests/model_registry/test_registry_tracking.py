import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from chaos.syscall_faults import SyscallFault, injecting
from rft_platform.model_registry.mlflow_client import open_client
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.model_registry.tracking import system_metrics
from tests.support.builders import Step

REPOSITORY = Path(__file__).parents[2]


def test_steps_and_rounds_become_metric_histories(registry: ModelRegistry) -> None:
    run = registry.training_run("first")
    run.log_steps([Step(step, {f"m{index}": step + index / 100 for index in range(60)}) for step in range(1, 21)])
    run.log_round(3, {"eval/gsm8k/reward/mean@4": 0.5, "nan": float("nan")})
    run.log_round(3, {"rows": 8, "seconds": {"load": 0.5}, "judge_version": "abc", "reused": True}, prefix="round/")

    history = run.client.get_metric_history(run.run_id, "train/m7")
    assert [(point.step, point.value) for point in history] == [(step, step + 0.07) for step in range(1, 21)]
    (point,) = run.client.get_metric_history(run.run_id, "eval/gsm8k/reward/mean_at_4")
    assert (point.step, point.value) == (3, 0.5)
    latest = run.client.get_run(run.run_id).data.metrics
    assert {name: value for name, value in latest.items() if name.startswith("round/")} == {
        "round/rows": 8.0, "round/seconds/load": 0.5,
    }  # fmt: skip


def test_few_calls_log_many_values(registry: ModelRegistry, monkeypatch) -> None:
    run = registry.training_run("first")
    sent: list[int] = []
    monkeypatch.setattr(run.client, "log_batch", lambda run_id, metrics: sent.append(len(metrics)))
    run.log_steps([Step(step, {f"m{index}": 0.0 for index in range(15)}) for step in range(8)])
    assert sent == [120]
    run.log_steps([])
    assert sent == [120]
    run.log_steps([Step(step, {f"m{index}": 0.0 for index in range(15)}) for step in range(70)])
    assert sent == [120, 1000, 50]


STEPS = [Step(step, {"loss": 1 / step, "seconds": step * 0.1, "ratio": float("nan")}) for step in range(1, 5)]


def all_points(registry: ModelRegistry) -> list[tuple[str, int, float]]:
    run = registry.training_run("first")
    keys = run.client.get_run(run.run_id).data.metrics
    return sorted((key, p.step, p.value) for key in keys for p in run.client.get_metric_history(run.run_id, key))


def log_a_phase(registry: ModelRegistry, steps: list[Step], reward: float = 0.5) -> None:
    run = registry.training_run("first")
    run.log_steps(steps)
    run.log_round(1, {"reward": reward, "rows": 8}, prefix="round/")


def test_a_repeated_phase_logs_nothing_twice(connect) -> None:
    log_a_phase(connect(), STEPS[:2])  # killed halfway
    log_a_phase(connect(), STEPS)
    once = all_points(connect())
    log_a_phase(connect(), STEPS[1:3])
    log_a_phase(connect(), [Step(step.step, {**step.metrics, "seconds": 9.0}) for step in STEPS], reward=0.9)

    assert str(all_points(connect())) == str(once), "as text, for NaN is not equal to itself"
    assert len(once) == 4 * 3 + 2
    assert ("round/reward", 1, 0.5) in once, "the first value stays"


@pytest.mark.slow
def test_a_phase_asks_for_its_run_once(registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    log_a_phase(registry, STEPS[:2])
    with monkeypatch.context() as replaced:
        replaced.setattr(MlflowClient, "get_run", lambda client, run_id: pytest.fail("the search has told"))
        log_a_phase(registry, STEPS)
        replaced.setattr(MlflowClient, "search_runs", lambda *_, **__: pytest.fail("the run is known"))
        link = registry.run_link("first")
    assert len(all_points(registry)) == 4 * 3 + 2
    assert f"/runs/{registry.training_run('first').run_id}/" in link


def test_a_killed_process_logs_nothing_twice(connect, tmp_path: Path, fault_library: Path) -> None:
    """The process is killed at its n-th write to the database, for several n; a last one ends the work."""
    registry = connect()
    database = tmp_path / "mlflow" / "mlflow.db"
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'tests/model_registry');"
        "from rft_platform.model_registry.models import ModelRegistry;"
        "from test_registry_tracking import STEPS, log_a_phase;"
        f"log_a_phase(ModelRegistry({registry.tracking_uri!r}, Path({str(registry.artifact_root)!r}),"
        " 'demo', 'demo-model'), STEPS)"
    )
    killed = 0
    for nth in (9, 30, 0):
        fault = SyscallFault("pwrite", signal="SIGKILL", path=database.name, nth=nth or 10**9)
        environment = {**os.environ, **injecting(fault_library, [fault])}
        killed += (
            subprocess.run([sys.executable, "-c", code], env=environment, cwd=REPOSITORY, timeout=120).returncode == -9
        )
    points = [(key, step) for key, step, _ in all_points(connect())]
    assert killed == 2
    assert len(points) == len(set(points)) == 4 * 3 + 2


@pytest.mark.slow
def test_a_repeated_phase_on_a_server_logs_nothing_twice(mlflow_server: str) -> None:
    for steps in (STEPS[:2], STEPS, STEPS[1:3]):
        log_a_phase(ModelRegistry(mlflow_server, None, "demo", "demo-model"), steps)
    points = [(key, step) for key, step, _ in all_points(ModelRegistry(mlflow_server, None, "demo", "demo-model"))]
    assert len(points) == len(set(points)) == 4 * 3 + 2


def test_a_continued_training_continues_its_run(connect) -> None:
    first = connect().training_run("my run", tags={"git": "abc"})
    first.log_params({"algorithm": {"lr": 1e-3, "args": {}}, "seed": 1})
    first.finish()

    again = connect().training_run("my run")
    assert again.client.get_run(again.run_id).info.status == "FINISHED", "looking it up changes nothing"
    again.reopen()
    again.log_params({"algorithm": {"lr": 2e-3, "args": {}}, "rounds": 5})

    assert again.run_id == first.run_id
    found = again.client.get_run(again.run_id)
    assert found.info.status == "RUNNING"
    assert found.data.params == {"algorithm.lr": "0.001", "algorithm.args": "{}", "seed": "1", "rounds": "5"}
    assert found.data.tags["changed.algorithm.lr"] == "0.002"
    assert found.data.tags["git"] == "abc"
    assert connect().training_run("another").run_id != first.run_id


def test_artifacts_are_copied_below_the_project(registry: ModelRegistry, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_text("# fine")
    run = registry.training_run("first")
    run.log_artifact(report, "rounds/r0001")
    copies = list((tmp_path / "mlflow" / "artifacts" / "demo").glob("*/artifacts/rounds/r0001/report.md"))
    assert [copy.read_text() for copy in copies] == ["# fine"]


@pytest.mark.slow
def test_a_store_whose_making_was_killed_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    code = f"from rft_platform.model_registry.mlflow_client import make_database; make_database('sqlite:///{file}')"
    maker = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not any(part.suffix == ".tmp" and part.stat().st_size for part in tmp_path.iterdir()):
        assert maker.poll() is None and time.monotonic() < deadline, "it never began to write"
        time.sleep(0.002)
    maker.kill()
    maker.wait()
    assert not file.exists(), "half a database is never seen"
    assert open_client(f"sqlite:///{file}").search_experiments()
    assert [part.name for part in tmp_path.iterdir() if part.name.endswith(".tmp")] == []


@pytest.mark.slow
def test_the_use_of_the_machine_is_sampled_and_continued(connect) -> None:
    run = connect().training_run("first")
    run.finish()
    for _ in range(2):
        with system_metrics(run, connect().tracking_uri, interval_s=0.2):
            time.sleep(1.0)
    history = run.client.get_metric_history(run.run_id, "system/cpu_utilization_percentage")
    steps = [point.step for point in history]
    assert len(steps) >= 2 and steps == list(range(len(steps)))
    assert all(0 <= point.value <= 100 for point in history)


def test_the_run_names_its_x_axes(connect) -> None:
    run = connect().training_run("first")
    assert "`train/...`: optimiser step" in run.client.get_run(run.run_id).data.tags["mlflow.note.content"]
