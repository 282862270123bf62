import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rft_platform.registry.models import ModelRegistry
from rft_platform.registry.store import open_client
from rft_platform.registry.tracking import metric_name


@dataclass
class Step:
    step: int
    metrics: dict[str, float]


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


def test_a_continued_training_continues_its_run(connect) -> None:
    first = connect().training_run("my run", tags={"git": "abc"})
    first.log_params({"algorithm": {"lr": 1e-3, "args": {}}, "seed": 1})
    first.finish()

    again = connect().training_run("my run")
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


def test_names_are_mapped_to_what_mlflow_takes() -> None:
    assert metric_name("eval/a b/best@8") == "eval/a b/best_at_8"
    assert metric_name("loss(é%)") == "loss_é__"


def test_a_store_whose_making_was_killed_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    code = f"from rft_platform.registry.store import make_database; make_database('sqlite:///{file}')"
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
