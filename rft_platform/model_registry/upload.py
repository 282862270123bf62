"""Upload a checkpoint to an MLflow server, as a model that other machines load with ``mlflow.transformers``."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.common.errors import RftError
from rft_platform.common.redaction import redact
from rft_platform.model_registry.mlflow_model import MLMODEL, has_weights, uploaded_files

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

LOG = logging.getLogger(__name__)


def upload_model(client: "MlflowClient", run_id: str, folder: Path, artifact_path: str, max_bytes: float) -> bool:
    """Upload ``folder`` to ``artifact_path`` of a run; returns whether the run has the model now.

    ``folder`` has MLflow's description (``mlflow_model``), whose file ``MLmodel`` is uploaded last and marks the upload
    as complete. A folder without full weights (a LoRA adapter, a policy between two saves), or with weights of more
    than ``max_bytes``, is left out. A failure is logged as a warning: the version can still be served from its folder.
    """
    from mlflow.exceptions import MlflowException

    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not has_weights(folder) or size > max_bytes:
        return False
    try:
        known = {file.path for file in client.list_artifacts(run_id, artifact_path)}
        if f"{artifact_path}/{MLMODEL}" not in known:
            for file in uploaded_files(folder):
                below = file.parent.relative_to(folder).as_posix()
                client.log_artifact(run_id, str(file), artifact_path if below == "." else f"{artifact_path}/{below}")
    except (RftError, MlflowException, OSError) as error:
        LOG.warning(
            "%s was not uploaded to MLflow: %s; other machines cannot load it. registry.upload_max_gb: 0 uploads no "
            "weights",
            folder, redact(str(error)),
        )  # fmt: skip
        return False
    return True
