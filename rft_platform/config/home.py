"""Paths of a project's state. Every path below ``RFT_HOME`` is defined in this module and nowhere else."""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.common.files import read_json

if TYPE_CHECKING:
    from rft_platform.cluster.interface import Cluster
    from rft_platform.cluster.local.local_cluster import LocalCluster

#: Umask of every process that writes below a home: no permissions for other users.
PRIVATE_UMASK = 0o077


@dataclass(frozen=True)
class Home:
    """The folder that holds all state of one project (default ``./.rft``)."""

    root: Path

    @classmethod
    def from_environment(cls) -> "Home":
        """The folder that ``RFT_HOME`` names, or ``.rft`` below the current folder."""
        return cls(Path(os.environ.get("RFT_HOME", ".rft")).absolute())

    @property
    def config_file(self) -> Path:
        """The project's resolved configuration, written when a run starts."""
        return self.root / "rft.yaml"

    @property
    def ray_cluster(self) -> Path:
        """Address and namespace of the Ray cluster of the project; missing if it runs on this machine."""
        return self.root / "ray.json"

    @property
    def config_source(self) -> Path:
        """The folder of the user's file that ``config_file`` was made from, as one line of text."""
        return self.root / "config_source"

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
        """TensorBoard event files, one folder per project and name."""
        return self.root / "tensorboard"

    @property
    def leases(self) -> Path:
        """One lease file per long-lived process."""
        return self.root / "leases"

    @property
    def logs(self) -> Path:
        """The folder with the log files of the project's processes."""
        return self.root / "logs"

    @property
    def cluster(self) -> "Cluster":
        """What runs the project's engines, trainer and workers: since its last start, what its configuration named."""
        try:
            ray = read_json(self.ray_cluster)
        except FileNotFoundError:
            ray = None
        return self.cluster_at(ray)

    def cluster_at(self, ray: Mapping[str, str] | None) -> "Cluster":
        """This machine; or the Ray cluster with the ``address`` and ``namespace`` of ``ray``."""
        if ray is None:
            from rft_platform.cluster.local.local_cluster import LocalCluster

            return LocalCluster(self.leases, self.logs)
        from rft_platform.cluster.ray.ray_cluster import RayCluster
        from rft_platform.object_store.mirror import mirror_of

        return RayCluster(self.leases, self.logs, **ray, has_copy=mirror_of(self.root) is not None)

    @property
    def own_servers(self) -> "LocalCluster":
        """What runs the servers of `rft ui` and `rft serve`, which end with them and stay on this machine."""
        from rft_platform.cluster.local.local_cluster import LocalCluster

        return LocalCluster(self.leases / "servers", self.logs)

    @property
    def web_token(self) -> Path:
        """The access token of the project's web servers, readable by the owner only."""
        return self.root / "web_token"

    @property
    def alerts(self) -> Path:
        """One small file per failed run for which an alert was sent."""
        return self.root / "alerts"

    @property
    def rounds(self) -> Path:
        """One folder per round: rollouts, judged experiences, evaluation."""
        return self.root / "rounds"

    @property
    def imports(self) -> Path:
        """Datasets made of imported traces: a folder a kind of row, a file an import."""
        return self.root / "imports"

    @property
    def received(self) -> Path:
        """Spans that `rft receive` got: a file a day."""
        return self.root / "received"

    @property
    def prompts(self) -> Path:
        """The newest search for a prompt: its note, its report and the picture."""
        return self.root / "prompts"

    @property
    def checkpoints(self) -> Path:
        """The default ``checkpoint_root_dir``."""
        return self.root / "checkpoints"

    @property
    def holds_results(self) -> bool:
        """Whether a stage has stored a result. Without one, another project or other settings may use the folder."""
        return any(self.rounds.glob("*/*.json"))

    def make_private(self) -> str | None:
        """Remove the permissions of other users from the folder. Returns a message if there were any, else None.

        A folder that holds no project is left alone, because ``RFT_HOME`` may name a wrong folder by mistake. So is
        one of another user, such as the root of a mounted volume, whose permissions cannot be changed.
        """
        if not self.config_file.exists() or not (mode := stat.S_IMODE(self.root.stat().st_mode)) & PRIVATE_UMASK:
            return None
        try:
            self.root.chmod(mode & ~PRIVATE_UMASK)
        except OSError:
            return None
        for path in self.root.rglob("*"):
            # Another user's file, or a file removed meanwhile: the permissions of the root folder protect it.
            with suppress(OSError):
                if not path.is_symlink():
                    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~PRIVATE_UMASK)
        return f"{self.root} was open to other users of this machine; its permissions now allow only its owner"


@contextmanager
def private_files() -> Iterator[None]:
    """Make files and folders created inside the block, also by child processes, accessible to their owner only."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)
