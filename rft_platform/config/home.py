"""Where a project keeps its state: every path below ``RFT_HOME`` is named here and nowhere else."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """The folder that holds all state of one project (default ``./.rft``)."""

    root: Path

    @classmethod
    def from_environment(cls) -> "Home":
        """The folder that ``RFT_HOME`` names, else ``.rft`` below the current folder."""
        return cls(Path(os.environ.get("RFT_HOME", ".rft")).absolute())

    @property
    def config_file(self) -> Path:
        """The project's resolved configuration, written when a run starts."""
        return self.root / "rft.yaml"

    @property
    def dagster(self) -> Path:
        """``DAGSTER_HOME``: runs, events and schedules."""
        return self.root / "dagster"

    @property
    def mlflow(self) -> Path:
        """The default MLflow store: ``mlflow.db`` and ``artifacts/``."""
        return self.root / "mlflow"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files, one folder a project and name."""
        return self.root / "tensorboard"

    @property
    def leases(self) -> Path:
        """One lease file a long-lived process."""
        return self.root / "leases"

    @property
    def logs(self) -> Path:
        """Standard output of the long-lived processes."""
        return self.root / "logs"

    @property
    def alerts(self) -> Path:
        """One small file a failed run that people were told of."""
        return self.root / "alerts"

    @property
    def rounds(self) -> Path:
        """One folder a round: rollouts, judged experiences, evaluation."""
        return self.root / "rounds"

    @property
    def checkpoints(self) -> Path:
        """The default ``checkpoint_root_dir``."""
        return self.root / "checkpoints"
