"""Where a project keeps its state: every path below ``RFT_HOME`` is named here and nowhere else."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

#: What every process that writes below a home does without: permissions for other users.
PRIVATE_UMASK = 0o077


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
    def web_token(self) -> Path:
        """The access token of the project's web servers, for its owner only."""
        return self.root / "web_token"

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

    @property
    def holds_results(self) -> bool:
        """Whether a phase has left anything: until then the folder is free for another project or other settings."""
        return any(self.rounds.glob("*/*.json"))

    def make_private(self) -> str | None:
        """Take the permissions of other users away from a project's folder; a line about it if they had any.

        A folder that holds no project is left alone: ``RFT_HOME`` may name a wrong one by mistake.
        """
        if not self.config_file.exists() or not stat.S_IMODE(self.root.stat().st_mode) & PRIVATE_UMASK:
            return None
        for path in [*self.root.rglob("*"), self.root]:
            with suppress(OSError):  # another user's, or removed meanwhile: the root bars the way to it
                if not path.is_symlink():
                    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~PRIVATE_UMASK)
        return f"{self.root} was open to other users of this machine; now only its owner can read and write it"


@contextmanager
def private_files() -> Iterator[None]:
    """Files and folders that the block makes are their owner's alone, as are those of processes that it starts."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)
