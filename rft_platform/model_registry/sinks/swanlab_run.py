"""Write metrics to SwanLab (extra ``swanlab``).

``SWANLAB_MODE``, ``SWANLAB_API_KEY`` and ``SWANLAB_API_HOST`` have their usual meaning. Without a login the run is
stored below ``RFT_HOME/swanlab``, and ``swanlab sync`` uploads it.
"""

import os

from rft_platform.model_registry.sinks.experiment_service import ExperimentService, RunState
from rft_platform.model_registry.sinks.metric_sink import Axis, Points


class SwanlabRun(ExperimentService):
    """A run of SwanLab, in which every metric has its own x axis."""

    service = "SwanLab"

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
