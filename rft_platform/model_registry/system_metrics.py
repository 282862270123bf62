"""Log the use of the machine (processors, memory, disk, network, GPUs) to an MLflow run while a block runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rft_platform.model_registry.tracking import TrainingRun

_MONITOR = "mlflow.system_metrics.system_metrics_monitor"


@contextmanager
def system_metrics(run: TrainingRun, tracking_uri: str, interval_s: float = 10.0) -> Iterator[None]:
    """Sample every ``interval_s`` seconds; ``MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL`` replaces it.

    The x axis of these metrics is the number of the sample; a continued run continues it. MLflow samples in a thread,
    and only while the status of the run is RUNNING.
    """
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    logging.getLogger(_MONITOR).setLevel(logging.WARNING)
    run.reopen()
    monitor = SystemMetricsMonitor(
        run.run_id, sampling_interval=interval_s, resume_logging=True, tracking_uri=tracking_uri
    )
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()
