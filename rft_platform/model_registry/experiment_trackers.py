"""Weights & Biases and SwanLab: one run per training, continued by every process that has points for it.

A state file beside the run's data holds the run's id, and a digest of what was logged for each key: a stage that is
repeated after a kill adds no points. The project's files hold the same metrics, so a failure of the service is only
logged.

The environment variables of both services have their usual meaning (``WANDB_MODE``, ``WANDB_API_KEY``,
``WANDB_BASE_URL``; ``SWANLAB_MODE``, ``SWANLAB_API_KEY``, ``SWANLAB_API_HOST``). Without a login the run is stored
below ``RFT_HOME/wandb`` or ``RFT_HOME/swanlab``, and ``wandb sync`` or ``swanlab sync`` uploads it.
"""

import logging
import netrc
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from rft_platform.cluster.local.locks import locked
from rft_platform.common.files import digest_json, read_json, write_json
from rft_platform.common.redaction import redact
from rft_platform.model_registry.metric_sinks import Axis, MetricSink, Points
from rft_platform.model_registry.tracking import flatten

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class RunState:
    """The content of the state file."""

    id: str = field(default_factory=lambda: uuid4().hex[:16])
    points: int = 0  # number of points logged so far
    logged: dict[str, str] = field(default_factory=dict)  # key -> digest of its points


class ExperimentService(MetricSink):
    """A run of an experiment tracker whose data are in ``folder``. ``settings`` are the project's, for comparisons."""

    service = ""  # the service's name, for messages
    package = ""  # the Python package that sends to it

    def __init__(self, folder: Path, project: str, name: str, settings: Mapping[str, Any]) -> None:
        self.folder, self.project, self.name = folder, project, name
        self.settings = {
            key: redact(str(value)) if isinstance(value, str) else value for key, value in settings.items()
        }
        self._file = folder / f"{digest_json([project, name])[:16]}.json"

    @classmethod
    def of(cls, folder: Path, project: str, name: str, config: Mapping[str, Any]) -> "ExperimentService | None":
        """The run of a project with this (nested) configuration: an entry point. None: the package is not installed."""
        return None if find_spec(cls.package) is None else cls(folder, project, name, dict(flatten(config, ".")))

    def write(self, key: str, axis: Axis, points: Points) -> None:
        """Log the points of ``key`` once. A failure is logged as a warning, and the next call tries all its points."""
        points = [(x, values) for x, values in points if values]
        if not points:
            return
        digest = digest_json([[x, {name: repr(value) for name, value in values.items()}] for x, values in points])
        with locked(self._file):
            state = RunState(**read_json(self._file)) if self._file.exists() else RunState()
            if state.logged.get(key) == digest:
                return
            try:
                self.send(state, axis, points)
            except Exception as error:
                LOG.warning(
                    "%s did not take the metrics of %s: %s: %s; they are in MLflow and in the project's files",
                    self.service, key, type(error).__name__, redact(str(error)),
                )  # fmt: skip
                return
            state.points += len(points)
            state.logged[key] = digest
            write_json(self._file, {name: getattr(state, name) for name in ("id", "points", "logged")})

    @abstractmethod
    def send(self, state: RunState, axis: Axis, points: Points) -> None:
        """Open the run ``state.id`` of the service, log the points, and close it."""


def has_login(host: str, file: Path) -> bool:
    """Whether the netrc ``file`` holds a login for ``host``."""
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class SwanlabRun(ExperimentService):
    """A run of SwanLab, in which every metric has its own x axis."""

    service, package = "SwanLab", "swanlab"

    def send(self, state: RunState, axis: Axis, points: Points) -> None:
        """Log the points. A point that the service already has keeps its first value."""
        import swanlab

        self.folder.mkdir(parents=True, exist_ok=True)
        default = swanlab.Settings()
        settings = swanlab.Settings(
            interactive=False,
            terminal=default.terminal.model_copy(update={"proxy_type": "none"}),
            probe=default.probe.model_copy(update={"requirements": False}),  # the list of packages takes seconds
        )
        # without a login and a mode in the environment: data for a later upload
        mode = {} if settings.api_key or "SWANLAB_MODE" in os.environ else {"mode": "offline"}
        swanlab.init(
            project=self.project,
            name=self.name,
            id=state.id,
            resume="allow",
            log_dir=str(self.folder),
            config=dict(self.settings),
            settings=settings,
            **mode,
        )
        try:
            for x, values in points:
                swanlab.log(values, step=x)
        finally:
            swanlab.finish()


class WandbRun(ExperimentService):
    """A run of Weights & Biases; the x axes are the metrics ``axis/optimizer_step`` and ``axis/round``."""

    service, package = "Weights & Biases", "wandb"

    def send(self, state: RunState, axis: Axis, points: Points) -> None:
        """Log the points with ascending step numbers over all processes, because the service takes no others."""
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            run = wandb.init(
                project=self.project,
                name=self.name,
                id=state.id,
                resume="allow",
                dir=str(self.folder.parent),  # the package appends its own folder "wandb"
                config=dict(self.settings),
                allow_val_change=True,
                mode=_mode(),
                settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
            )
            run.define_metric("train/*", step_metric="axis/optimizer_step")
            for prefix in ("round/*", "eval/*"):
                run.define_metric(prefix, step_metric="axis/round")
            for number, (x, values) in enumerate(points, state.points):
                run.log({f"axis/{axis}": x, **values}, step=number)
            run.finish()
        finally:
            wandb.teardown()  # ends the package's own process, which would outlive the command


def _mode() -> str | None:
    """``offline`` without a login; None: what the environment says."""
    if "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ:
        return None
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return None if has_login(host, file) else "offline"
