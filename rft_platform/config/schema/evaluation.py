"""Sections ``evaluation``, ``registry`` and ``monitor``: how a policy is evaluated, and where results are stored."""

from importlib.metadata import entry_points
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rft_platform.config.schema.section import Section

#: Metrics that an evaluation stores for each task, so that two policies can be compared task by task.
PAIRED_METRICS = ("sampled_pass", "greedy_pass", "mean_reward")


class Gate(Section):
    """When an evaluated policy becomes the champion."""

    metric: str = "sampled_pass"
    """Metric of the evaluation that decides, for example sampled_pass, greedy_pass or mean_reward."""
    min_delta: float = 0.0
    """Minimum gain over the champion on the same tasks. At 0 the gain must be positive: a tie promotes nothing. Below
    0, a loss of this size is permitted; it counts from the best version so far, so several losses do not add up."""
    min_value: float | None = None
    """Minimum value of the metric itself."""
    confident: bool | None = None
    """true: the lower end of the 95 % interval of the gain (paired over tasks) must exceed ``min_delta``. false: the
    gain itself must exceed it. Default: true for sampled_pass, greedy_pass and mean_reward, which are stored per task;
    false for any other metric."""

    @property
    def needs_interval(self) -> bool:
        """Whether the decision uses the confidence interval of the gain."""
        return self.metric in PAIRED_METRICS if self.confident is None else self.confident


class Regression(Section):
    """A held-out taskset on which a version must not fall below the start to become the champion."""

    taskset: str
    """Name of one of ``eval_tasksets``; not the first one, on which ``evaluation.gate`` decides."""
    metric: Literal["sampled_pass", "greedy_pass", "mean_reward"] = "sampled_pass"
    """Metric that must not fall."""
    tolerance: PositiveFloat = 0.05
    """Accepted loss against the start, in the unit of the metric."""
    confident: bool = True
    """true: the lower end of the 95 % interval of the difference from the start (paired over tasks) must lie above
    minus ``tolerance``. false: the difference itself must not be below it."""


class Evaluation(Section):
    """Evaluation on the held-out tasksets."""

    sampled_n: PositiveInt = 1
    """Sampled runs per task, unless the taskset sets ``rollout_args.n``."""
    greedy: bool = True
    """Run every task once with greedy decoding, in addition to the sampled runs. A call that sets a temperature
    keeps it."""
    every: PositiveInt = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    gate: Gate = Gate()
    regression: Regression | None = None
    """A taskset that blocks the promotion of a version whose scores on it fell since the start."""
    schedule: str | None = None
    """Times at which the daemon also evaluates the newest policy, as the five fields of cron, in UTC: ``0 3 * * *`` is
    every night at 3 o'clock UTC. The Automation tab shows the schedule as nightly_evaluation. While `rft run` drives
    the project, it is skipped. null: off."""
    after_refusal: Literal["continue", "restart"] | None = None
    """Where the next training starts if the gate refused a round's version, or a canary, an A/B test or a roll-back
    withdrew it. ``continue``: from that version.
    ``restart``: from the champion, or in an online project from the version that serves. Default: restart in an online
    project, else continue."""
    bootstrap_seed: NonNegativeInt = 42
    """Seed of the best@k and worst@k estimates."""


class Registry(Section):
    """The model registry."""

    tracking_uri: str | None = None
    """URI of the MLflow server. Default: an SQLite store below ``RFT_HOME``."""
    model_name: str | None = None
    """Name of the registered model. Default: ``<project>-<name>``."""
    upload_max_gb: NonNegativeFloat = 20.0
    """With an MLflow server, a checkpoint whose weights have at most this many GB is uploaded as a model, which other
    machines load with ``mlflow.transformers.load_model`` and ``mlflow models serve``. 0: none is uploaded."""


#: Group of the entry points of destinations of metrics (``model_registry/metric_sinks.py``).
METRIC_SINKS = "rft_platform.metric_sinks"
_BUILT_IN = ("tensorboard", "mlflow")


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _known(name: str) -> str:
    if name in _BUILT_IN:
        return name
    known = (*_BUILT_IN, *sorted(entry_points(group=METRIC_SINKS).names))
    if name not in known:
        raise ValueError(
            f"monitor.monitor_type: got {name!r}; expected {', '.join(known)}: a package adds a name by an entry point "
            f"of the group {METRIC_SINKS}"
        )
    return name


class Monitor(Section):
    """Where step metrics are written."""

    monitor_type: Annotated[
        tuple[Annotated[str, AfterValidator(_known)], ...],
        BeforeValidator(_as_tuple, json_schema_input_type=str | tuple[str, ...]),
    ] = ("mlflow", "tensorboard")
    """One name or a list. MLflow always receives all metrics, because it holds the models; ``tensorboard`` adds event
    files, ``wandb`` Weights & Biases and ``swanlab`` SwanLab (extras of the same names). Installed packages add names
    by entry points of the group ``rft_platform.metric_sinks``."""
    tensorboard_dir: str | None = None
    """Folder of the event files; default: ``tensorboard`` below ``RFT_HOME``."""
    traces: NonNegativeInt = 0
    """Runs of each round that MLflow gets as traces, with the judge's rewards as assessments: from the lowest to the
    highest reward. The messages are sent as they are stored. Online projects send no messages, but the feedback of
    users with its comments, which ``rft forget`` deletes. A trace takes 0.05 to 0.2 seconds."""
    otlp_endpoint: str | None = None
    """Address of an OTLP/HTTP receiver, such as ``http://127.0.0.1:4318``. It gets the runs of ``traces``, too, as
    spans with the attributes of OpenTelemetry's GenAI conventions. ``OTEL_EXPORTER_OTLP_HEADERS`` holds its headers.
    null: none. Refused for online projects, because ``rft forget`` cannot erase what a receiver has."""
    system_metrics: bool = False
    """Log the use of processors, memory, disk, network and NVIDIA GPUs (with package ``nvidia-ml-py``) to MLflow, as
    ``system/...``, every 10 seconds while a round trains."""
    openlineage: bool = False
    """Emit an OpenLineage event at the start and the end of each stage (extra ``openlineage``). The client's own
    configuration says where to: ``openlineage.yml``, or ``OPENLINEAGE_URL``."""

    @property
    def plugged(self) -> tuple[str, ...]:
        """The names in ``monitor_type`` that are entry points: looking one up reads all installed packages."""
        return tuple(name for name in self.monitor_type if name not in _BUILT_IN)
