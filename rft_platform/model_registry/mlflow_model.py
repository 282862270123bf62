"""A checkpoint as a model in MLflow's format: MLflow loads it in place, without a copy of its weights.

``mlflow.transformers.load_model`` and ``mlflow.pyfunc.load_model`` read the file ``MLmodel`` in the folder of the
checkpoint. It says that the weights are in this folder, too. MLflow expects the tokenizer in a subfolder, whose files
are hard links. An adapter's description names the folder of the full weights, relative to the checkpoint if both are in
one home. ``upload_model`` sends the same to an MLflow server, for other machines.
"""

import logging
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.common.digests import MANIFEST, weight_files
from rft_platform.common.errors import RftError
from rft_platform.common.files import atomic_path, read_sealed_json
from rft_platform.common.recorded_paths import from_manifest
from rft_platform.common.redaction import redact

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


MLMODEL = "MLmodel"
TASK = "llm/v1/chat"  # requests and answers in the form of OpenAI's chat API
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_ADAPTER = "adapter_config.json"
_IN_A_HOME = ("rounds", "leases", "dagster")  # a folder that holds one of these is a home
_COMPONENTS = "components"  # MLflow's folder with the parts of a pipeline other than the model
_REQUIREMENTS, _PYTHON_ENV = "requirements.txt", "python_env.yaml"
_NOT_FOR_TRANSFORMERS = (
    MANIFEST,
    "steps.json",
    "version.json",
    "registered_model_meta",
    MLMODEL,
    _REQUIREMENTS,
    _PYTHON_ENV,
)


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` holds a LoRA adapter instead of full weights."""
    return (folder / _ADAPTER).exists()


def full_weights_of(folder: Path) -> Path:
    """The folder of the full weights on which the adapter in checkpoint ``folder`` was trained."""
    manifest = read_sealed_json(folder / MANIFEST)
    return from_manifest(manifest["base_model"], manifest["request"].get("output"), folder)


def has_weights(folder: Path) -> bool:
    """Whether ``folder`` holds full weights: no adapter, and no checkpoint of trainer state alone."""
    return any((folder / name).exists() for name in _WEIGHTS)


def model_files(folder: Path) -> Iterator[Path]:
    """The files in ``folder`` that transformers reads, without those of the trainer and of MLflow."""
    return (file for file in folder.iterdir() if file.is_file() and file.name not in _NOT_FOR_TRANSFORMERS)


def uploaded_files(folder: Path) -> list[Path]:
    """The files of a described folder that a copy needs, ``MLmodel`` last."""
    components = (file for file in (folder / _COMPONENTS).rglob("*") if file.is_file())
    return [*model_files(folder), *components, *(folder / name for name in (_REQUIREMENTS, _PYTHON_ENV, MLMODEL))]


def describe_checkpoint(folder: Path) -> bool:
    """Write MLflow's description into ``folder`` unless it is there; returns whether MLflow can load the folder.

    ``MLmodel`` is written last and marks the description as complete. A folder without weights, or one that this
    process cannot write, gets none.
    """
    adapter = is_adapter(folder)
    if (folder / MLMODEL).exists():
        return True
    if not (adapter or has_weights(folder)) or not os.access(folder, os.W_OK):
        return False
    with atomic_path(folder / _COMPONENTS) as components:
        (components / "tokenizer").mkdir(parents=True)
        for file in model_files(folder):
            if ".safetensors" not in file.name:
                _link(file, components / "tokenizer" / file.name)
    needs = ["transformers", "torch", *(["peft"] if adapter else [])]
    with atomic_path(folder / _REQUIREMENTS) as file:
        file.write_text("".join(f"{name}=={version(name).partition('+')[0]}\n" for name in needs))
    with atomic_path(folder / _PYTHON_ENV) as file:
        file.write_text(f"python: {platform.python_version()}\ndependencies:\n- -r {_REQUIREMENTS}\n")
    _write_description(folder, adapter)
    return True


def _write_description(folder: Path, adapter: bool) -> None:
    from mlflow.models import Model, ModelSignature
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA

    description = Model(
        signature=ModelSignature(inputs=CHAT_MODEL_INPUT_SCHEMA, outputs=CHAT_MODEL_OUTPUT_SCHEMA),
        metadata={"task": TASK},
    )
    description.add_flavor(
        "python_function",
        loader_module="mlflow.transformers",
        python_version=platform.python_version(),
        env={"virtualenv": _PYTHON_ENV},
    )
    description.add_flavor(
        "transformers",
        task="text-generation",
        inference_task=TASK,
        instance_type="TextGenerationPipeline",
        pipeline_model_type="AutoModelForCausalLM",
        model_binary=_relative_base(folder) if adapter else ".",
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
        source_model_name=folder.name,
        transformers_version=version("transformers"),
        **({"peft_adaptor": "."} if adapter else {}),
    )
    with atomic_path(folder / MLMODEL) as file:
        description.save(str(file))


def _relative_base(folder: Path) -> str:
    """The folder of an adapter's full weights: relative to ``folder`` if both move together, otherwise absolute."""
    base = full_weights_of(folder).absolute()
    home = next((each for each in folder.parents if any((each / name).exists() for name in _IN_A_HOME)), None)
    return os.path.relpath(base, folder) if home is not None and base.is_relative_to(home) else str(base)


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, target)


LOG = logging.getLogger(__name__)


def upload_model(client: "MlflowClient", run_id: str, folder: Path, artifact_path: str, max_bytes: float) -> bool:
    """Upload ``folder`` to ``artifact_path`` of a run; returns whether the run has the model now.

    ``folder`` has MLflow's description (``mlflow_model``), whose file ``MLmodel`` is uploaded last and marks the upload
    as complete. A folder without full weights (a LoRA adapter, a policy between two saves), or with weights of more
    than ``max_bytes``, is left out. A failure is logged as a warning: the version can still be served from its folder.
    """
    from mlflow.exceptions import MlflowException

    size = sum(file.stat().st_size for file in weight_files(folder))
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
