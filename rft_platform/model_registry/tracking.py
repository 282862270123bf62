"""Log a training to MLflow: parameters, step and round metrics, reports, use of the machine, lineage.

MLflow appends every metric value that it receives and cannot remove one. A stage that is repeated after a kill would
duplicate its points. A metric is therefore logged once per name and step; the first value is kept.

The lineage of a run names the datasets that it read and a LoggedModel for each checkpoint that it made. A LoggedModel
is linked to its run as an output, and to the datasets by its metrics: those of its last optimiser step were measured on
the rows of the round, those of its evaluation on held-out tasks. It has no files: the weights are those of the model
version that its tags name.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rft_platform.common.errors import DiskFullError
from rft_platform.common.redaction import redact

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient


LOG = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()  # destination and value
RUN_TAG = "rft.run"  # identity of a training run: a continued project finds its MLflow run by this tag
_NOTE = "mlflow.note.content"  # MLflow's page of the run shows it as the description
_AXES = (
    "x axis (step) of the metrics: `train/...`: optimiser step (`train/round`: the round of a step); `round/...` and "
    "`eval/...`: round; `system/...`: number of the sample."
)
_BATCH_LIMITS = {"metrics": 1000, "params": 100, "tags": 100}  # entities that MLflow accepts in one call
_NAME_LIMIT = 250  # characters
_DIGEST_LENGTH = 8  # characters of a changed name
_DISALLOWED = re.compile(r"[^/\w.\- ]")
_COUNT, _COUNT_IN_MLFLOW = re.compile(r"@(?=\d+\Z)"), re.compile(r"_at_(?=\d+\Z)")  # ``mean@4``


class StepLike(Protocol):
    """One optimiser step and its metrics, as the trainer reports it."""

    @property
    def step(self) -> int:
        """Number of the optimiser step."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the step, by name."""


@dataclass(frozen=True, slots=True)
class MetricLink:
    """What a metric was measured on: a LoggedModel of MLflow and a dataset of the run."""

    model_id: str | None = None
    dataset_name: str | None = None
    dataset_digest: str | None = None


def metric_name(name: str) -> str:
    """The name under which MLflow stores a metric or a parameter; different names stay different.

    A name that MLflow accepts stays as it is, and ``mean@4`` becomes ``mean_at_4``. In any other name, disallowed
    characters become ``_`` and parts such as ``..`` are removed; it ends in a digest of the original name.
    """
    parts = _DISALLOWED.sub("_", _COUNT.sub("_at_", name)).split("/")
    accepted = "/".join(part for part in parts if part not in ("", ".", ".."))
    if accepted.startswith(".."):
        accepted = f"_{accepted}"
    if 0 < len(accepted) <= _NAME_LIMIT and _COUNT_IN_MLFLOW.sub("@", accepted) == name:
        return accepted
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    return f"{accepted[: _NAME_LIMIT - _DIGEST_LENGTH - 1]}-{digest}"


class TrainingRun:
    """One MLflow run: the log of one training of a project, over any number of processes and restarts.

    A stage makes its own object. One query tells it what MLflow has; the object adds what it logs itself.
    """

    def __init__(self, client: "MlflowClient", experiment_id: str, found: "Run") -> None:
        """``found`` is the run as MLflow has it now."""
        self.client = client
        self.run_id = str(found.info.run_id)
        self.experiment_id = experiment_id
        self._status = found.info.status
        self._params = dict(found.data.params)
        self._newest: dict[str, int] = {metric.key: metric.step for metric in found.data.to_proto().metrics}

    @classmethod
    def find_or_create(
        cls, client: "MlflowClient", experiment_id: str, name: str, tags: Mapping[str, str]
    ) -> "TrainingRun":
        """The run tagged with ``name``, whatever its status; a new one if there is none."""
        found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{name}'", max_results=1)
        if found:
            return cls(client, experiment_id, found[0])
        return cls(
            client,
            experiment_id,
            client.create_run(experiment_id, run_name=name, tags={**tags, RUN_TAG: name, _NOTE: _AXES}),
        )

    def log_steps(self, steps: Iterable[StepLike], prefix: str = "train/", result: MetricLink | None = None) -> None:
        """Log the metrics of many optimiser steps in one call (one per thousand values, MLflow's limit).

        ``result`` is the LoggedModel that the steps made; the metrics of the last step are linked to it.
        """
        values = [(prefix + name, value, step.step) for step in steps for name, value in step.metrics.items()]
        self._log_metrics(values, result, max((step for _, _, step in values), default=None))

    def log_round(
        self, number: int, metrics: Mapping[str, Any], prefix: str = "", link: MetricLink | None = None
    ) -> None:
        """Log the metrics of round ``number``, with the round as x axis.

        The x axis of ``log_steps`` is the optimiser step, so no metric name may be used in both. Nested mappings get
        names with a slash. Values that are not numbers, such as names and versions in a note, are left out.
        """
        values = [
            (prefix + name, value, number)
            for name, value in flatten(metrics, "/")
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        self._log_metrics(values, link, number)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log a (nested) configuration under dotted names.

        MLflow never changes a parameter's first value. If a continued run has a different configuration, the new value
        is stored in the tag ``changed.<name>``.
        """
        from mlflow.entities import Param, RunTag

        known = self._params
        flat = {metric_name(name): redact(str(value))[:6000] for name, value in flatten(params, ".")}
        new = [Param(name, value) for name, value in flat.items() if name not in known]
        changed = {f"changed.{name}": value for name, value in flat.items() if known.get(name, value) != value}
        self._log("params", new)
        self._params = {**flat, **known}
        self._log("tags", [RunTag(metric_name(name), value) for name, value in changed.items()])

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags of the run, in one call."""
        from mlflow.entities import RunTag

        self._log("tags", [RunTag(name, str(value)) for name, value in tags.items()])

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Copy a file of the project (a report, a picture) to the run's artifacts. A failure is only a warning."""
        try:
            self.client.log_artifact(self.run_id, str(path), folder or None)
        except DiskFullError:
            raise
        except Exception as error:  # also of the libraries of an artifact store, such as S3
            self._warn("artifacts", f"{folder}/{path.name}", error)

    def finish(self) -> None:
        """Mark the run as finished; ``reopen`` continues it."""
        self.client.set_terminated(self.run_id, status="FINISHED")
        self._status = "FINISHED"

    def reopen(self) -> None:
        """Mark the run as running."""
        if self._status != "RUNNING":
            self.client.update_run(self.run_id, status="RUNNING")
            self._status = "RUNNING"

    def _log_metrics(
        self, values: Sequence[tuple[str, float, int]], link: MetricLink | None, linked_step: int | None
    ) -> None:
        """Log values that MLflow does not have; ``link`` belongs to those of ``linked_step``."""
        from mlflow.entities import Metric

        if not values:
            return
        now = int(time.time() * 1000)
        points = {(metric_name(name), step): float(value) for name, value, step in values}
        logged = self._logged(points)
        linked = {} if link is None else asdict(link)
        metrics = [
            Metric(key, value, now, step, **(linked if step == linked_step else {}))
            for (key, step), value in points.items()
            if (key, step) not in logged
        ]
        self._log("metrics", metrics)
        for key, step in points:
            self._newest[key] = max(step, self._newest.get(key, step))
        if logged:
            LOG.info("MLflow run %s already has %d of %d metric values", self.run_id, len(logged), len(points))

    def _log(self, kind: str, entities: Sequence[Any]) -> None:
        """Log metrics, params or tags, in as few calls as possible."""
        size = _BATCH_LIMITS[kind]
        for start in range(0, len(entities), size):
            self._log_part(kind, entities[start : start + size])

    def _log_part(self, kind: str, entities: Sequence[Any]) -> None:
        """Log entities in one call. If MLflow refuses the call, log each half; a single refused entity is a warning.

        The project's files have every value, so a refusal must not end a round. That MLflow is unavailable is an error.
        """
        from mlflow.exceptions import MlflowException

        try:
            self.client.log_batch(self.run_id, **{kind: entities})
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            if len(entities) == 1:
                self._warn(kind, entities[0].key, error)
                return
            middle = len(entities) // 2
            self._log_part(kind, entities[:middle])
            self._log_part(kind, entities[middle:])

    def _warn(self, kind: str, name: str, error: Exception) -> None:
        warn_once(f"MLflow run {self.run_id}", f"{kind} {name[:_NAME_LIMIT]!r}", redact(str(error))[:500])

    def _logged(self, points: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
        """Return those ``points`` (name and step) that MLflow already has.

        A metric's history is read only if its newest step is not before the step to log; so a training that is not
        repeated reads no history.
        """
        newest = self._newest
        asked = {(key, step) for key, step in points if key in newest and step <= newest[key]}
        found: set[tuple[str, int]] = set()
        for key in sorted({key for key, _ in asked}):
            found |= {(key, point.step) for point in self.client.get_metric_history(self.run_id, key)}
        return found & asked


def warn_once(destination: str, what: str, error: str) -> None:
    """Log that a destination refused a value, once per process; the project's files have it."""
    if (destination, what) not in _warned:
        _warned.add((destination, what))
        LOG.warning("%s refused %s: %s; it is in the project's files", destination, what, error)


def flatten(value: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping, each with its keys joined by ``separator``."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from flatten(item, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", item


WEIGHTS_TAG = "weights_digest"
VERSION_TAG = "model_version"
_DIGEST_LIMIT = 36  # characters that MLflow accepts
_CONTEXT = "mlflow.data.context"


@dataclass(frozen=True, slots=True)
class RunDataset:
    """Data that a run read: rows that it trained on, or tasks of an evaluation."""

    name: str
    digest: str
    source: Path | str
    context: Literal["training", "evaluation"]
    profile: Mapping[str, Any]  # plain values, shown with the dataset

    def link(self, model_id: str | None = None) -> MetricLink:
        """Link metrics to this dataset and to a LoggedModel."""
        return MetricLink(model_id, self.name, self.digest[:_DIGEST_LIMIT])


def log_dataset(run: TrainingRun, dataset: RunDataset) -> None:
    """Add a dataset to the inputs of a run. MLflow stores an equal dataset only once."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(
        name=dataset.name,
        digest=dataset.digest[:_DIGEST_LIMIT],
        source_type="local",
        source=json.dumps({"uri": str(dataset.source)}),
        profile=json.dumps({**dataset.profile, "digest": dataset.digest}),
    )
    run.client.log_inputs(run.run_id, [DatasetInput(entity, [InputTag(_CONTEXT, dataset.context)])])


def log_model(run: TrainingRun, name: str, step: int, tags: Mapping[str, Any]) -> str:
    """Create the LoggedModel of a checkpoint as an output of the run at an optimiser step; return its id.

    ``tags`` must contain ``weights_digest``: the same run with the same weights always has the same LoggedModel.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    given = {key: str(value) for key, value in tags.items() if value is not None}
    known = find_model(run, given[WEIGHTS_TAG])
    if known is None:
        made = run.client.create_logged_model(run.experiment_id, name, run.run_id, given, model_type="policy")
    model_id = str(made.model_id) if known is None else known
    run.client.finalize_logged_model(model_id, LoggedModelStatus.READY)  # again if a kill interrupted the first time
    outputs = None if known is None else run.client.get_run(run.run_id).outputs
    if outputs is None or model_id not in {output.model_id for output in outputs.model_outputs}:
        run.client.log_outputs(run.run_id, [LoggedModelOutput(model_id, step)])
    return model_id


def set_model_version(run: TrainingRun, model_id: str, name: str, version: int) -> None:
    """Name the model version of a LoggedModel's weights in its tags."""
    run.client.set_logged_model_tags(model_id, {"registered_model": name, VERSION_TAG: str(version)})


def find_model(run: TrainingRun, weights_digest: str) -> str | None:
    """The id of the run's LoggedModel with these weights, or None."""
    condition = f"tags.`{WEIGHTS_TAG}` = '{weights_digest}' AND source_run_id = '{run.run_id}'"
    found = run.client.search_logged_models([run.experiment_id], condition, max_results=1)
    return str(found[0].model_id) if found else None


_MONITOR = "mlflow.system_metrics.system_metrics_monitor"


@contextmanager
def system_metrics(run: TrainingRun, tracking_uri: str, interval_s: float = 10.0) -> Iterator[None]:
    """Sample every ``interval_s`` seconds; ``MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL`` replaces it.

    The x axis of these metrics is the number of the sample; a continued run continues it. MLflow samples in a thread,
    and only while the status of the run is RUNNING.
    """
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    logging.getLogger(_MONITOR).setLevel(logging.WARNING)
    run.reopen()
    monitor = SystemMetricsMonitor(
        run.run_id, sampling_interval=interval_s, resume_logging=True, tracking_uri=tracking_uri
    )
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()
