"""Upload a checkpoint to an MLflow server, as a model that other machines load with ``mlflow.transformers``.

``python -m rft_platform.model_registry.upload FOLDER RUN_ID ARTIFACT_PATH`` does the work with the server's address in
``MLFLOW_TRACKING_URI``. It is a separate process, because MLflow's writer of models imports torch.
"""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rft_platform.common.files import remove_leftovers, temporary_path
from rft_platform.common.redaction import redact

LOG = logging.getLogger(__name__)
MLMODEL = "MLmodel"
TASK = "llm/v1/chat"  # requests and answers in the form of OpenAI's chat API
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_NOT_UPLOADED = ("manifest.json",)  # files of the platform's checkpoints


def upload_model(tracking_uri: str, run_id: str, folder: Path, artifact_path: str, max_bytes: float) -> bool:
    """Upload ``folder`` to ``artifact_path`` of a run; returns whether the run has the model now.

    A folder without full weights (a LoRA adapter, a policy between two saves), or with weights of more than
    ``max_bytes``, is left out. A failure is logged as a warning: the version can still be served from its folder.
    """
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not any((folder / name).exists() for name in _WEIGHTS) or size > max_bytes:
        return False
    command = [sys.executable, "-P", "-m", __name__, str(folder), run_id, artifact_path]
    environment = os.environ | {"MLFLOW_TRACKING_URI": tracking_uri, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        LOG.warning(
            "%s was not uploaded to MLflow %s: %s; other machines cannot load it. registry.upload_max_gb: 0 uploads no "
            "weights",
            folder, redact(tracking_uri), redact(last),
        )  # fmt: skip
    return done.returncode == 0


def main(folder: Path, run_id: str, artifact_path: str) -> None:
    """Upload a model unless the run has it. The file ``MLmodel`` is uploaded last and marks the upload as complete."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    if any(file.path == f"{artifact_path}/{MLMODEL}" for file in client.list_artifacts(run_id, artifact_path)):
        return
    remove_leftovers(folder)
    work = temporary_path(folder)  # beside the checkpoint: hard links need the same file system
    work.mkdir()
    try:
        model = _write_model(folder, work)
        description = (model / MLMODEL).rename(work / MLMODEL)
        client.log_artifacts(run_id, str(model), artifact_path)
        client.log_artifact(run_id, str(description), artifact_path)
    finally:
        shutil.rmtree(work)


def _write_model(folder: Path, work: Path) -> Path:
    """Write ``folder`` in MLflow's format below ``work``; returns the model's folder. The weights are not loaded."""
    import mlflow.transformers
    import transformers
    from mlflow.models import Model

    source, model = work / "source", work / "model"
    source.mkdir()
    for file in _model_files(folder):
        _link(file, source / file.name)
    mlflow.transformers.save_model(
        transformers_model=str(source),
        path=str(model),
        task=TASK,
        pip_requirements=[f"transformers=={transformers.__version__}", "torch"],
    )
    saved = Model.load(str(model))  # MLflow's server names the model in its answers: not by a path of this machine
    saved.flavors["transformers"]["source_model_name"] = folder.name
    saved.save(str(model / MLMODEL))
    return model


def _model_files(folder: Path) -> Iterator[Path]:
    """The files that transformers reads, without the trainer's files."""
    return (file for file in folder.iterdir() if file.is_file() and file.name not in _NOT_UPLOADED)


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
