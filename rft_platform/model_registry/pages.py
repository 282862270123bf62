"""Links to pages of MLflow's interface that stay valid when its address changes.

A link is a path of the Dagster interface, whose server redirects it to MLflow's current address; the part after ``#``
names the page.
"""

from urllib.parse import quote

MLFLOW_PATH = "/mlflow"


def run_page(experiment_id: str, run_id: str) -> str:
    """The page with the curves of a training run, as the part of an address after ``#``."""
    return f"/experiments/{experiment_id}/runs/{run_id}/model-metrics"


def run_link(experiment_id: str, run_id: str) -> str:
    """Link to the page with the curves of a training run."""
    return f"{MLFLOW_PATH}#{run_page(experiment_id, run_id)}"


def version_link(model_name: str, version: int | str) -> str:
    """Link to the page of a model version."""
    return f"{MLFLOW_PATH}#/models/{quote(model_name, safe='')}/versions/{version}"
