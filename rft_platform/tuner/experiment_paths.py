"""Location of an experiment: ``<root>/<project>/<experiment>`` with its checkpoints, curves and state."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home

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

    Raises UserError for a name that cannot be a folder name.
    """
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
