"""Links to pages of MLflow's interface that stay valid when its address changes.

A link is a path of the Dagster interface of ``rft ui``, whose server redirects it to MLflow's current address; the part
after ``#`` names the page. Another Dagster webserver has no redirect: there a link begins with the address in
``RFT_MLFLOW_URL``, if the process that makes the link has this variable.
"""

import os
from urllib.parse import quote

MLFLOW_PATH = "/mlflow"
#: MLflow shows runs, charts and models only in this part of its interface; otherwise it opens the part for traces.
WORKFLOW = "machine_learning"
ADDRESS = "RFT_MLFLOW_URL"  #: environment variable with the address of MLflow's interface, as a browser reaches it


def run_page(experiment_id: str, run_id: str) -> str:
    """The URL fragment (after ``#``) of the page with the curves of a training run."""
    return f"/experiments/{experiment_id}/runs/{run_id}/model-metrics?workflowType={WORKFLOW}"


def run_link(experiment_id: str, run_id: str) -> str:
    """Link to the page with the curves of a training run."""
    return _link(run_page(experiment_id, run_id))


def version_link(model_name: str, version: int | str) -> str:
    """Link to the page of a model version."""
    return _link(f"/models/{quote(model_name, safe='')}/versions/{version}?workflowType={WORKFLOW}")


def _link(page: str) -> str:
    address = os.environ.get(ADDRESS, "").rstrip("/")
    return f"{address}/#{page}" if address else f"{MLFLOW_PATH}#{page}"
