"""The result of ``tune()``, read from the experiment's files.

An experiment is in ``<root>/<project>/<experiment>``, with its checkpoints, curves and state.
"""

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home

if TYPE_CHECKING:
    from rft_platform.rounds.project.project import Project


ROOT = "checkpoints"
DEFAULT_PROJECT = "AgentScope"

_NAME = re.compile(r"[\w][\w.+=@-]{0,127}")


@dataclass(frozen=True, slots=True)
class ExperimentPaths:
    """Location of one experiment of a project."""

    root: Path  # absolute
    project: str
    experiment: str

    @property
    def folder(self) -> Path:
        """Checkpoints (``global_step_<n>``), ``monitor/tensorboard`` and the state of the run."""
        return self.root / self.project / self.experiment

    @property
    def home(self) -> Home:
        """``RFT_HOME`` of the experiment: rows, Dagster's instance, MLflow's store, logs.

        An experiment always has its own home; ``RFT_HOME`` in the environment is ignored.
        """
        return Home(self.folder / ".rft")

    @property
    def tensorboard(self) -> Path:
        """Folder for ``tensorboard --logdir``."""
        return self.folder / "monitor" / "tensorboard"


def experiment_paths(root: str | None, project: str | None, experiment: str | None) -> ExperimentPaths:
    """Return the location of an experiment; by default ``./checkpoints/AgentScope/Experiment-<time>``.

    Raises UserError for a name that cannot be a folder name, and for a root that is no folder.
    """
    if root is not None and "://" in root:
        raise UserError(f"checkpoint_root_dir {root}: tune() keeps checkpoints in a folder; give its path")
    paths = ExperimentPaths(
        Path(root or ROOT).absolute(),
        project or DEFAULT_PROJECT,
        experiment or f"Experiment-{time.strftime('%Y%m%d%H%M%S')}",
    )
    for what, name in (("project_name", paths.project), ("experiment_name", paths.experiment)):
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{what} {name!r} is not a valid name of a folder: use letters, digits and . _ - + = @, at most 128"
            )
    return paths


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One round; round 0 is the initial model. A number that was not measured is None."""

    step: int  # optimiser steps made so far; unchanged if nothing was trained
    round: int = 0
    reward: float | None = None  # mean over the runs explored
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the optimiser step: loss, entropy, ...
    eval: dict[str, float] = field(default_factory=dict)  # results on eval_dataset; empty if not evaluated


@dataclass(frozen=True, slots=True, repr=False)
class TuneResult:
    """Folder of the tuned model, training history, and ids in MLflow and Dagster."""

    project: str
    experiment: str
    folder: Path  # folder of the experiment: checkpoints and monitor/tensorboard
    home: Path  # RFT_HOME of the experiment
    checkpoint: Path | None  # Hugging Face folder of the last policy; None: nothing was trained
    steps: int  # optimiser steps of the last policy
    model_version: str | None  # models:/NAME/VERSION
    mlflow_run_id: str | None
    history: list[StepRecord]  # by round
    dagster_run_ids: list[str]  # oldest first, including runs of interrupted calls

    def __repr__(self) -> str:
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        shown = {"checkpoint": checkpoint, "steps": self.steps, "model_version": self.model_version}
        return f"TuneResult({', '.join(f'{name}={value!r}' for name, value in shown.items())}, ...)"

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        from dataclasses import asdict

        paths = {name: str(value) for name, value in asdict(self).items() if isinstance(value, Path)}
        return {**asdict(self), **paths}


def result_of(project: "Project", paths: ExperimentPaths) -> TuneResult:
    """Read the result of an experiment; the experiment may still run."""
    from rft_platform.rounds.project.record import published

    store = project.store
    policies = {n: policy for n in store.rounds() if (policy := published(store, n)) is not None}
    last = policies[max(policies)] if policies else None
    trained = last is not None and last.policy_version > 0
    version = None if last is None or last.model_version is None else last.model_version
    return TuneResult(
        project=paths.project,
        experiment=paths.experiment,
        folder=paths.folder,
        home=paths.home.root,
        checkpoint=Path(last.folder) if last is not None and trained else None,
        steps=0 if last is None else last.policy_version,
        model_version=None if version is None else f"models:/{project.model_name}/{version}",
        mlflow_run_id=_mlflow_run(project),
        history=[_step_record(project, number, policy.policy_version) for number, policy in policies.items()],
        dagster_run_ids=_dagster_runs(project),
    )


def _step_record(project: "Project", number: int, step: int) -> StepRecord:
    from rft_platform.rounds.project.record import read

    record = read(project.store, number)
    judged, trained, evaluated = record.judged, record.trained(), record.evaluated
    return StepRecord(
        step=step,
        round=number,
        reward=judged.mean_reward if judged else None,
        metrics=trained.metrics if trained else {},
        eval=evaluated.metrics if evaluated and evaluated.results else {},
    )


def _mlflow_run(project: "Project") -> str | None:
    from rft_platform.rounds.setup.connections import connect_registry

    return connect_registry(project).training_run(project.config.name).run_id


def _dagster_runs(project: "Project") -> list[str]:
    from rft_platform.jobs.instance import open_instance

    with open_instance(project.home, capture_output=False) as instance:
        return [record.dagster_run.run_id for record in instance.get_run_records(ascending=True)]
