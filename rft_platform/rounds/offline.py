"""Offline training: train a base model on demonstrations, preference pairs or a teacher's distribution.

The training is the only round of its project. Its dataset, training, policy and evaluation are stored in ``r0001``, in
the same form as those of other projects' rounds. The dataset is a single Parquet file, in which each row has its
source; ``leaked_tasks`` finds held-out tasks whose prompts also occur in it.
"""

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import atomic_path, digest_file
from rft_platform.config.load import config_digest
from rft_platform.config.resolve import OfflineKind
from rft_platform.config.schema.buffer import ExperienceBuffer
from rft_platform.config.training_specs import optimizer_spec
from rft_platform.experience.file_names import round_key
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.evaluate import evaluate_round, is_due
from rft_platform.rounds.project.code_version import code_version
from rft_platform.rounds.project.project import Project, stamps
from rft_platform.rounds.project.record import (
    DatasetFile,
    Policy,
    RoundEvaluation,
    Trained,
    published,
    read,
    refuse_if_next_round_is_trained,
    required,
    write,
)
from rft_platform.rounds.setup.connections import connect_registry, connect_trainer, publish_base
from rft_platform.rounds.setup.demonstrations import json_cell, origin_cells
from rft_platform.rounds.train import (
    Training,
    loaded_digest,
    reference_folder,
    run_training,
    spec_with_critic,
    teacher_folder,
)
from rft_platform.tasks.dataset import normalise
from rft_platform.tasks.task import ORIGIN
from rft_platform.training.protocol import TrainRequest

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.tasks.offline_dataset import OfflineDataset
    from rft_platform.tasks.task import Task
    from rft_platform.training.service.trainer_client import TrainerClient


ROUND = 1
_CANARY_ROWS = 8
_CANARY_TOKENS = 48  # per row: enough to tell weights apart, within the limit of any model


def train_offline(
    project: Project, trainer: "TrainerClient", kind: OfflineKind, round_number: int, dagster_run_id: str
) -> tuple[Policy, Trained]:
    """Train on the round's dataset and publish the policy. A repeated call after a kill gives the same weights.

    Returns the policy and the training's result.

    Raises UserError if the project runs another kind of training, StorageError if the dataset is missing.
    """
    check_kind(project, kind, round_number)
    refuse_if_next_round_is_trained(project.store, round_number)
    dataset = required_dataset(project, round_number)
    parent = publish_base(project)
    request = offline_request(project, dataset, parent, dagster_run_id)
    training = Training(
        request=request,
        parent=parent,
        round=round_number,
        total_steps=project.settings.offline_steps(dataset.rows),
        reads=(parent,),
        canary_sequences=partial(_canary_sequences, Path(dataset.path), Path(parent.folder)),
    )
    return run_training(project, trainer, training)


def check_kind(project: Project, kind: OfflineKind, round_number: int) -> None:
    """Raise UserError unless the project runs this kind of training."""
    if project.settings.offline != kind or round_number != ROUND:
        here = (
            f"{project.settings.offline}_job for {round_key(ROUND)}"
            if project.settings.offline
            else "the jobs of rounds"
        )
        raise UserError(
            f"{kind}_job for {round_key(round_number)}: the project {project.config.project}/{project.config.name} "
            f"runs {here} (mode {project.config.mode}, algorithm_type {project.config.algorithm.algorithm_type})"
        )


def start_training(project: Project) -> None:
    """Start trainer and registry in parallel: each takes seconds, mostly for imports."""
    with ThreadPoolExecutor(1) as pool:
        registry = pool.submit(connect_registry(project).prepare)
        connect_trainer(project)
        registry.result()


def offline_request(project: Project, dataset: DatasetFile, parent: Policy, dagster_run_id: str) -> TrainRequest:
    """The request for the trainer; equal for the same dataset and configuration."""
    config, algorithm = project.config, spec_with_critic(project)
    pairs = project.settings.offline == "dpo"
    return TrainRequest(
        parent=parent.folder,
        parent_version=parent.policy_version,
        output=str(project.checkpoints),
        algorithm=algorithm,
        optimizer=optimizer_spec(config.algorithm.optimizer, project.settings.offline_steps(dataset.rows)),
        demonstrations=None if pairs else dataset.path,
        preferences=dataset.path if pairs else None,
        train_batch_size=project.batches.train_batch_size,
        max_steps=config.offline_steps,
        epochs=config.buffer.total_epochs,
        max_tokens_per_pack=project.memory.max_tokens_per_pack,
        max_tokens_per_row=config.model.max_model_len,
        seed=config.seed,
        fresh_optimizer=True,
        lora=project.settings.lora,
        reference=reference_folder(project, algorithm),
        teacher=teacher_folder(project),
        save_interval=config.trainer.save_interval,
        save_hf_checkpoint=config.trainer.save_hf_checkpoint,
        max_checkpoints_to_keep=config.trainer.max_checkpoints_to_keep,
        lineage=offline_lineage(project, dataset, dagster_run_id),
    )


def offline_lineage(project: Project, dataset: DatasetFile, dagster_run_id: str) -> dict[str, Any]:
    """Origin of the weights, stored in the checkpoint's manifest and the tags of its model version."""
    config = project.config
    teacher = {"teacher": config.algorithm.teacher_model_path} if project.settings.offline == "distill" else {}
    return {
        "round": ROUND,
        "project": config.project,
        "name": config.name,
        "base_model": config.model.model_path,
        "algorithm": config.algorithm.algorithm_type,
        **teacher,
        "dataset": Path(dataset.path).name,
        "dataset_rows": dataset.rows,
        "dataset_sha256": dataset.sha256,
        "data_digest": dataset.digest,
        "source": dataset.source,
        "source_sha256": dataset.source_digest,
        "config_digest": config_digest(config),
        "code_version": code_version(),
        "dagster_run_id": dagster_run_id,
        **({"plugins_digest": loaded_digest(config)} if config.algorithm.plugins else {}),
    }


def _canary_sequences(dataset: Path, model: Path) -> list[list[int]]:
    """Token sequences for the canary: the first tokens of a few rows. Any sequences would serve to compare weights."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(dataset) as file:
        table = next(file.iter_batches(_CANARY_ROWS)).to_pydict()
    names = [name for name in ("messages", "prompt", "chosen", "completion") if name in table]
    texts = [
        " ".join(str(message["content"]) for name in names for message in json.loads(table[name][row]))
        for row in range(len(table[names[0]]))
    ]
    sequences = [ids[:_CANARY_TOKENS] for ids in _encode(model, texts)]
    return [ids for ids in sequences if len(ids) > 1]


def _encode(model: Path, texts: list[str]) -> list[list[int]]:
    """Token ids of texts. Reads ``tokenizer.json`` directly if it exists: importing transformers takes seconds."""
    file = model / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer

        encoded = Tokenizer.from_file(str(file)).encode_batch(texts, add_special_tokens=False)
        return [each.ids for each in encoded]
    from rft_platform.openai_api.tokenizer import PolicyTokenizer

    return PolicyTokenizer(model).encode(texts)


def evaluate_offline(
    project: Project,
    connect_engine: Callable[[Project], PolicyEngine],
    registry: "ModelRegistry",
    round_number: int,
    force: bool = False,
    promote: bool = True,
) -> RoundEvaluation:
    """Evaluate the round's policy and, if not done before, the base model.

    The base model comes first, so that the report can show the difference. Without held-out tasks nothing is evaluated
    and no engine is started.
    """
    required(project.store, round_number)
    if not project.eval_tasks:
        outcome = RoundEvaluation("no held-out tasks: set buffer.explorer_input.eval_tasksets to evaluate the policy")
        write(project.store, round_number, outcome)
        return outcome
    engine = connect_engine(project)
    if round_number and is_due(project, 0) and not read(project.store, 0).has(RoundEvaluation):
        evaluate_round(project, engine, registry, 0)
    return evaluate_round(project, engine, registry, round_number, force=force, promote=promote)


LOG = logging.getLogger(__name__)
FILES = {"sft": "sft_dataset.parquet", "dpo": "preference_pairs.parquet", "distill": "sft_dataset.parquet"}


def load_dataset(project: Project) -> "OfflineDataset":
    """The configured rows. Unchanged files are read once per process.

    Raises UserError that names the columns found and expected, or the malformed row.
    """
    kind, buffer = _kind(project), project.config.buffer.trainer_input.experience_buffer
    if buffer.path is None:
        raise UserError("buffer.trainer_input.experience_buffer.path is not set: name the dataset to train on")
    dataset = _load_once("dpo" if kind == "dpo" else "sft", buffer.model_dump_json(), stamps(Path(buffer.path)))
    if "label" in dataset.rows[0]:
        _check_loss_of_labels(project)
    return dataset


def _check_loss_of_labels(project: Project) -> None:
    """Raise UserError if the loss compares the two answers of a pair: an answer with a label has no partner."""
    from rft_platform.algorithms.losses.registry import LOSSES

    name = project.settings.spec.policy_loss
    if not LOSSES.get(name).mismatched:
        raise UserError(
            f"buffer.trainer_input.experience_buffer.path: its rows are answers with a label, and the loss {name} "
            "compares pairs: set algorithm_type: kto, or give a dataset with the columns chosen and rejected"
        )


def make_dataset(project: Project, round_number: int) -> DatasetFile:
    """Write the dataset of a training into its round's folder; an intact existing file is kept.

    Raises UserError if its source has changed since weights were trained on it.
    """
    store, known = project.store, read(project.store, round_number).dataset
    trained = published(store, round_number) is not None
    if known is not None and known.erased and trained:
        return known  # `rft forget` erased rows from the file, and those of the source are others than trained on
    dataset, file = load_dataset(project), _target(project, round_number)
    if known is not None and known.digest != dataset.digest and trained:
        raise UserError(
            f"{dataset.report.source} has changed since {round_key(round_number)} was trained on it (data version "
            f"{known.digest[:16]}, now {dataset.digest[:16]}): restore it, or start a run with another name"
        )
    if known is not None and known.digest == dataset.digest:
        if file.exists() and digest_file(file) == known.sha256:
            return known
        LOG.warning("%s is missing or damaged and is written again", file)
    _write(dataset, file)
    written = DatasetFile(
        path=str(file),
        rows=len(dataset.rows),
        bytes=file.stat().st_size,
        sha256=digest_file(file),
        digest=dataset.digest,
        source=dataset.report.source,
        source_files=dataset.files,
        report=json.loads(json.dumps(asdict(dataset.report))),  # with the types that are read again
    )
    write(store, round_number, written)
    return written


def required_dataset(project: Project, round_number: int) -> DatasetFile:
    """The dataset, after a check of its full digest. Raises StorageError if it is missing or damaged."""
    found = read(project.store, round_number).dataset
    asset = "preference_pairs" if project.settings.offline == "dpo" else "sft_dataset"
    if found is None:
        raise StorageError(f"{round_key(round_number)} has no dataset: materialise {asset} for it first")
    file = Path(found.path)
    if not file.exists() or digest_file(file) != found.sha256:
        raise StorageError(f"{file}: missing or damaged: materialise {asset} for {round_key(round_number)} again")
    return found


def _kind(project: Project) -> OfflineKind:
    if project.settings.offline is None:
        config = project.config
        raise UserError(
            f"project {config.project}/{config.name} is not an offline training (mode {config.mode}, algorithm_type "
            f"{config.algorithm.algorithm_type}): set mode train and sft, dpo or gkd"
        )
    return project.settings.offline


def _target(project: Project, round_number: int) -> Path:
    return project.store.round_folder(round_number) / FILES[_kind(project)]


@lru_cache(maxsize=2)
def _load_once(kind: str, buffer_json: str, _stamps: tuple[tuple[str, int, int], ...]) -> "OfflineDataset":
    from rft_platform.tasks.offline_dataset import Columns, load_conversations, load_pairs

    buffer = ExperienceBuffer.model_validate_json(buffer_json)
    named = buffer.format
    columns = Columns(
        prompt_type=named.prompt_type,
        messages=named.messages_key,
        tools=named.tools_key,
        prompt=named.prompt_key,
        response=named.response_key,
        chosen=named.chosen_key,
        rejected=named.rejected_key,
        label=named.label_key,
        system_prompt=named.system_prompt,
    )
    load = load_pairs if kind == "dpo" else load_conversations
    return load(str(buffer.path), columns, split=buffer.split, subset_name=buffer.subset_name, limit=buffer.limit)


#: What the columns of a written dataset hold.
DESCRIPTIONS = {
    "messages": "The conversation to learn from, as JSON.",
    "prompt": "The conversation before the answer, as JSON.",
    "chosen": "The better answer, as JSON.",
    "rejected": "The worse answer, as JSON.",
    "completion": "An answer, as JSON.",
    "label": "Whether the answer is desirable: true or false.",
    "tools": "The tools offered, as JSON.",
    "source_file": "The file of the source dataset.",
    "source_row": "Number of the row in that file.",
    ORIGIN: "The traces that the row was imported from, as JSON.",
}


def _write(dataset: "OfflineDataset", target: Path) -> None:
    """Write each part of a row as JSON, with the source file and row number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in dataset.rows for name in row))
    columns: dict[str, pa.Array] = {
        name: pa.array([json_cell(row.get(name)) for row in dataset.rows], pa.string()) for name in names
    }
    columns["source_file"] = pa.array([file for file, _ in dataset.places], pa.string()).dictionary_encode()
    columns |= {name: pa.array(cells, pa.string()) for name, cells in origin_cells(dataset.origins).items()}
    columns["source_row"] = pa.array([number for _, number in dataset.places], pa.int64())
    with atomic_path(target) as temp:
        pq.write_table(pa.table(columns), temp, compression="zstd")


def leaked_tasks(project: Project, dataset: "OfflineDataset") -> "list[Task]":
    """The held-out tasks whose whole prompt is a user message of the dataset."""
    held_out = [task for _, tasks in project.eval_tasks for task in tasks.tasks]
    if not held_out:
        return []
    prompts = {
        normalise(str(message["content"]))
        for row in dataset.rows
        for message in row.get("messages") or row["prompt"]
        if message["role"] == "user"
    }
    return [task for task in held_out if normalise(task.prompt) in prompts]
