"""The dataset of an offline training as the single Parquet file that the trainer reads; each row has its source.

``leaked_tasks`` finds held-out tasks whose prompts also occur in the dataset.
"""

import json
import logging
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import atomic_path, digest_file
from rft_platform.config.resolve import OfflineKind
from rft_platform.config.schema.buffer import ExperienceBuffer
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.project.project import Project, stamps
from rft_platform.rounds.project.record import DatasetFile, published, read, write
from rft_platform.tasks.leakage import normalise

if TYPE_CHECKING:
    from rft_platform.tasks.offline_dataset import OfflineDataset
    from rft_platform.tasks.task import Task

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
    store, dataset = project.store, load_dataset(project)
    known, file = read(store, round_number).dataset, _target(project, round_number)
    if known is not None and known.digest != dataset.digest and published(store, round_number) is not None:
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
    from rft_platform.tasks.column_mapping import Columns
    from rft_platform.tasks.offline_dataset import load_conversations, load_pairs

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
}


def _write(dataset: "OfflineDataset", target: Path) -> None:
    """Write each part of a row as JSON, with the source file and row number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in dataset.rows for name in row))
    columns: dict[str, pa.Array] = {
        name: pa.array([_json(row.get(name)) for row in dataset.rows], pa.string()) for name in names
    }
    columns["source_file"] = pa.array([file for file, _ in dataset.places], pa.string()).dictionary_encode()
    columns["source_row"] = pa.array([number for _, number in dataset.places], pa.int64())
    with atomic_path(target) as temp:
        pq.write_table(pa.table(columns), temp, compression="zstd")


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


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
