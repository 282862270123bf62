"""Sections ``evaluation``, ``registry`` and ``monitor``: how a policy is measured, and where results are kept."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt

from rft_platform.config.section import Section

#: The metrics that an evaluation keeps task by task, so that two policies can be compared by them.
PAIRED_METRICS = ("sampled_pass", "greedy_pass", "mean_reward")


class Gate(Section):
    """When an evaluated policy becomes champion."""

    metric: str = "sampled_pass"
    min_delta: float = 0.0
    """Least gain over the champion on the same tasks. At 0 the gain must be positive: a tie promotes nothing."""
    min_value: float | None = None
    """Least value of its own."""
    confident: bool | None = None
    """true: the lower end of the gain's 95 % interval (paired over tasks) must exceed ``min_delta``. false: the gain
    itself decides. Default: true for sampled_pass, greedy_pass and mean_reward, which are kept task by task, false for
    any other metric."""

    @property
    def needs_interval(self) -> bool:
        """Whether the interval of the gain decides."""
        return self.metric in PAIRED_METRICS if self.confident is None else self.confident


class Evaluation(Section):
    """Evaluation on the held-out tasksets."""

    sampled_n: PositiveInt = 1
    """Sampled runs of a task, where the taskset's ``rollout_args.n`` says nothing else."""
    greedy: bool = True
    """A greedy run of every task beside the sampled ones."""
    every: PositiveInt = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    gate: Gate = Gate()
    schedule: str = "0 3 * * *"
    """Cron expression of the nightly evaluation of the champion."""
    bootstrap_seed: NonNegativeInt = 42
    """Seed of the best@k and worst@k estimates."""


class Registry(Section):
    """The model registry."""

    tracking_uri: str | None = None
    """MLflow server; default: a SQLite store below ``RFT_HOME``."""
    model_name: str | None = None
    """Registered model; default: ``<project>-<name>``."""


MonitorType = Literal["tensorboard", "mlflow", "wandb"]


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class Monitor(Section):
    """Where step metrics are written."""

    monitor_type: Annotated[tuple[MonitorType, ...], BeforeValidator(_as_tuple)] = ("mlflow", "tensorboard")
    """One name or a list. MLflow always has everything, since it holds the models; ``tensorboard`` adds event files."""
    tensorboard_dir: str | None = None
    """Folder of the event files; default: ``tensorboard`` below ``RFT_HOME``."""
