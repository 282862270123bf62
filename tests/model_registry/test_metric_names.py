"""Names that users choose: MLflow accepts every logged name, different names stay different, a refusal is a warning."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST
from mlflow.utils.validation import _validate_metric, _validate_param

from rft_platform.model_registry.metric_sinks import TensorBoardRun
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.model_registry.tracking import metric_name
from tests.support.builders import Step

ODD = (
    "tool//errors", "tool/errors", "/tool/errors", "tool/errors/", "./tool/errors", "../../x/..", "x", "..", "..0", ".",
    "/", "", " ", "a:b", "a_b", "a\nb", "a\0b", "mean@4", "mean_at_4", "mean@4\n", "mean@", "@4", "a@b@4", "numeric#2",
    "numeric_2", "m" * 250, "m" * 251, "m" * 300, "é" * 251, "错误//x", "\ud800", "\udfff", "𝔘", "a" * 249 + "@4",
)  # fmt: skip
PIECES = st.sampled_from(["/", "//", ".", "..", "@", "@4", "_at_4", "#2", ":", " ", "\n", "\0", "a", "错", "\ud800"])
NAMES = st.one_of(
    st.lists(PIECES, max_size=8).map("".join), st.text(st.characters(), max_size=20), st.text("a/.@_", max_size=300)
)


@given(NAMES)
def test_mlflow_accepts_the_name_of_every_metric_and_parameter(name: str) -> None:
    for stored in (metric_name(name), metric_name(f"round/workflow_metrics/{name}")):
        _validate_metric(stored, 1.0, 0, 0)
        _validate_param(stored, "value")


@given(NAMES, NAMES)
def test_different_names_stay_different(one: str, other: str) -> None:
    assert (metric_name(one) == metric_name(other)) == (one == other)


def test_odd_names_stay_different_and_usual_names_stay_as_they_are() -> None:
    assert len({metric_name(name) for name in ODD}) == len(ODD)
    for name in ("train/loss", "eval/held-out v1.2/reward/mean", "错误", "m" * 250, "x_at_home"):
        assert metric_name(name) == name
    assert metric_name("eval/gsm8k/reward/mean@4") == "eval/gsm8k/reward/mean_at_4"
    assert metric_name("eval/a b/best@8") == "eval/a b/best_at_8"
    assert metric_name("tool//errors").startswith("tool/errors-"), "still readable"
    assert metric_name("loss(é%)").startswith("loss_é__-")


def test_a_round_with_odd_metric_names_is_logged_and_can_be_repeated(connect: Callable[[], ModelRegistry]) -> None:
    metrics = {name: float(number) for number, name in enumerate(ODD)}
    for _ in range(2):
        run = connect().training_run("first")
        run.log_params({"workflow_args": {name: number for number, name in enumerate(ODD)}})
        run.log_round(1, {"workflow_metrics": metrics}, prefix="round/")
        run.log_steps([Step(1, metrics)])
    logged = run.client.get_run(run.run_id).data
    assert sorted(v for k, v in logged.metrics.items() if k.startswith("round")) == sorted(metrics.values())
    assert sorted(v for k, v in logged.metrics.items() if k.startswith("train")) == sorted(metrics.values())
    assert len(logged.params) == len(ODD)


def test_what_mlflow_refuses_is_one_warning_and_the_other_values_are_logged(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("rft_platform.model_registry.tracking.metric_name", lambda name: name)
    run = registry.training_run("first")
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            run.log_round(number, {"a": 1.0, "b//c": 2.0, "d": 3.0, "e": 4.0, "f//g": 5.0})
        run.log_params({"a": 1, "b//c": 2, "d": 3})
        run.set_tags({"a": 1, "b//c": 2, "d": 3})
        (file := tmp_path / "report.md").write_text("report")
        run.log_artifact(file, "../outside")
        run.log_artifact(file, "inside")
    logged = run.client.get_run(run.run_id).data
    assert logged.metrics == {"a": 1.0, "d": 3.0, "e": 4.0}
    assert logged.params == {"a": "1", "d": "3"}
    assert {"a", "d"} <= logged.tags.keys()
    assert [found.path for found in run.client.list_artifacts(run.run_id, "inside")] == ["inside/report.md"]
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    names = ("metrics 'b//c'", "metrics 'f//g'", "params 'b//c'", "tags 'b//c'", "artifacts '../outside/report.md'")
    assert [sum(name in line for line in refusals) for name in names] == [1] * 5, refusals
    assert len(refusals) == 5


def test_an_error_that_is_no_refusal_of_a_value_ends_the_call(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = registry.training_run("first")
    calls = []

    def log_batch(run_id: str, metrics: list[object]) -> None:
        calls.append(len(metrics))
        raise MlflowException("the run does not exist", error_code=RESOURCE_DOES_NOT_EXIST)

    monkeypatch.setattr(run.client, "log_batch", log_batch)
    with pytest.raises(MlflowException):
        run.log_round(1, {"a": 1.0, "b": 2.0})
    assert calls == [2]


def test_tensorboard_leaves_out_a_name_that_it_cannot_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardRun(tmp_path, "run")
    sink.log_round("r0001-round", 1, dict.fromkeys(ODD, 1.0))
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert set(events.Tags()["scalars"]) == {name for name in ODD if name.isprintable() or "\n" in name or "\0" in name}
    assert "'\\ud800'" in caplog.text
