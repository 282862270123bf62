"""Record traces in a store of MLflow, and leave the process's settings as they were."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SETTINGS = ("MLFLOW_TRACKING_URI", "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING")


@contextmanager
def recording(folder: Path, experiment: str) -> Iterator[tuple[Any, str]]:
    """The module ``mlflow``, whose traces go to a new experiment of a store in ``folder``, and the experiment's id."""
    before = {name: os.environ.get(name) for name in _SETTINGS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's own modules
        import mlflow

        os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"  # the queue drops traces if there are many
        mlflow.set_tracking_uri(store_in(folder))
        try:
            yield mlflow, mlflow.create_experiment(experiment, str(folder / "artifacts"))
        finally:
            mlflow.set_tracking_uri(before["MLFLOW_TRACKING_URI"])
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def store_in(folder: Path) -> str:
    """The tracking URI of the store in a folder."""
    return f"sqlite:///{folder}/mlflow.db"
