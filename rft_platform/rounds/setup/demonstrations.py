"""Check the demonstrations for supervised fine-tuning, and write them to the single file that the trainer reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import atomic_path, digest_file, digest_json
from rft_platform.config.schema.algorithm import Experts
from rft_platform.config.schema.trainer import WarmStart
from rft_platform.tasks.task import ORIGIN

WARM_START = "demonstrations.parquet"  #: what a warm start trains on, in the folder of round 0
EXPERTS = "experts.parquet"  #: what a training mixes into its rows
MESSAGES = "messages"  # column name of a dataset of conversations
Cells = dict[str, list[str | None]]


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The columns that the trainer reads, the digest of the dataset, and a message about its dropped rows."""

    columns: Cells
    digest: str
    left_out: str  # empty: no row was dropped


def write_demonstrations(settings: WarmStart | Experts, target: Path, section: str = "warm_start") -> str:
    """Write the configured demonstrations to ``target`` in the trainer's format; returns their digest.

    Raises UserError as ``read_demonstrations`` does.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    demonstrations = read_demonstrations(settings, section)
    columns = {name: pa.array(cells, pa.string()) for name, cells in demonstrations.columns.items()}
    with atomic_path(target) as temp:
        pq.write_table(pa.table(columns), temp, compression="zstd")
    return digest_json([demonstrations.digest, digest_file(target)])


def read_demonstrations(settings: WarmStart | Experts, section: str = "warm_start") -> Demonstrations:
    """Read a dataset of demonstrations.

    A dataset with a column ``messages`` and without ``format.prompt_key`` holds conversations, optionally with
    ``tools`` and tool calls; every assistant message is trained on. Any other dataset holds one prompt and one response
    per row. ``section`` of the configuration is named in errors.

    Raises UserError if the dataset cannot be read, lacks a column, or has a row without a response.
    """
    return _conversations(settings) if _are_conversations(settings) else _texts(settings, section)


def most_steps(settings: WarmStart, rows: int) -> int:
    """Maximum number of optimiser steps of a warm start on this number of demonstrations."""
    return settings.steps if settings.epochs is None else -(-settings.epochs * rows // settings.batch_size)


def _are_conversations(settings: WarmStart | Experts) -> bool:
    from rft_platform.tasks.sources import located_rows

    _, _, first = next(located_rows(str(settings.path), settings.split, settings.subset_name), ("", 0, {}))
    return MESSAGES in first and settings.format.prompt_key not in first


def _conversations(settings: WarmStart | Experts) -> Demonstrations:
    """The column ``messages`` and, if present, ``tools``, as JSON in each cell."""
    from rft_platform.tasks.offline_dataset import Columns, load_conversations

    named = Columns(messages=MESSAGES, system_prompt=settings.format.system_prompt)
    dataset = load_conversations(str(settings.path), named, split=settings.split, subset_name=settings.subset_name)
    names = list(dict.fromkeys(name for row in dataset.rows for name in row))
    columns: Cells = {name: [json_cell(row.get(name)) for row in dataset.rows] for name in names}
    return Demonstrations({**columns, **origin_cells(dataset.origins)}, dataset.digest, dataset.report.left_out())


def _texts(settings: WarmStart | Experts, section: str) -> Demonstrations:
    """The columns ``prompt``, ``response`` and ``system``."""
    from rft_platform.tasks.dataset import load_tasks

    if settings.format.prompt_key is None:
        raise UserError(
            f"{section}.path {settings.path}: {section}.format.prompt_key is null; name the column with the prompt"
        )
    dataset = load_tasks(
        str(settings.path),
        split=settings.split,
        subset_name=settings.subset_name,
        prompt_key=settings.format.prompt_key,
        response_key=settings.format.response_key,
        section=section,
    )
    answers = [task.answer for task in dataset.tasks]
    if None in answers:
        raise UserError(f"{section}.path {settings.path}: {answers.count(None)} rows have no response to learn from")
    system = [task.system or settings.format.system_prompt for task in dataset.tasks]
    origins = origin_cells([task.raw.get(ORIGIN) for task in dataset.tasks])
    texts: Cells = {"prompt": [task.prompt for task in dataset.tasks], "response": answers, "system": system}
    return Demonstrations({**texts, **origins}, dataset.digest, dataset.report.left_out())


def origin_cells(origins: Sequence[Any]) -> Cells:
    """The column that names the traces of imported rows; none if no row was imported."""
    return {ORIGIN: list(map(json_cell, origins))} if any(origins) else {}


def json_cell(value: Any) -> str | None:
    """A value as the JSON in a cell of a dataset; None stays None."""
    return None if value is None else json.dumps(value, ensure_ascii=False)
