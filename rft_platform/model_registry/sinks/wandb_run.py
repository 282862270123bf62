"""Write metrics to Weights & Biases (extra ``wandb``).

``WANDB_MODE``, ``WANDB_API_KEY`` and ``WANDB_BASE_URL`` have their usual meaning. Without a login the run is stored
below ``RFT_HOME/wandb``, and ``wandb sync`` uploads it.
"""

import os
from pathlib import Path
from urllib.parse import urlsplit

from rft_platform.model_registry.sinks.experiment_service import ExperimentService, RunState, has_login
from rft_platform.model_registry.sinks.metric_sink import Axis, Points


class WandbRun(ExperimentService):
    """A run of Weights & Biases; the x axes are the metrics ``axis/optimizer_step`` and ``axis/round``."""

    service = "Weights & Biases"

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
