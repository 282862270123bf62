"""Locate and read rows of a dataset: a file, the files of a split, or a dataset of the hub or of reasoning-gym."""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.config.paths import DATA_SUFFIXES
from rft_platform.config.schema.buffer import REASONING_GYM
from rft_platform.tasks.messages import NOT_JSON
from rft_platform.tasks.readers import NumberedRow, SplitPart, plain, read_rows, split_files, split_parts
from rft_platform.tasks.reasoning_gym import GymSource

LOG = logging.getLogger(__name__)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_hub_name(path: str) -> bool:
    """Whether ``path`` can be the name of a Hugging Face dataset: ``name`` or ``owner/name``."""
    return bool(_HUB_NAME.fullmatch(path))


@contextmanager
def without_hub_messages() -> Iterator[None]:
    """Hide messages of the Hugging Face packages in the block: without a network they log two lines for each retry.

    Import the packages before: an import sets their level.
    """
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def read_hub(name: str, split: str, subset_name: str | None) -> Iterator[NumberedRow]:
    """Rows of the dataset, numbered from 1; without a network they come from the local cache."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        raise UserError(
            f"dataset {name!r} is neither a file nor a folder here, and reading it by its Hugging Face name needs "
            "the package datasets: pip install datasets"
        ) from None
    if not Path(HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}").exists():
        LOG.warning("dataset %r is neither a file nor a folder here: asking Hugging Face for it", name)
    try:
        with without_hub_messages():
            dataset = datasets.load_dataset(name, subset_name, split=split)
    # Not found, offline, unknown subset or split; a dataset that is a script (RuntimeError) or cannot be built.
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"dataset {name!r} (subset {subset_name!r}, split {split!r}) is neither a file nor a folder here and "
            f"could not be read from Hugging Face: {reason}. Without a network, give the path of a local copy"
        ) from None
    for number, row in enumerate(dataset, start=1):
        yield number, plain(dict(row))


#: The file (or dataset) of a row, its line there (see ``readers.NumberedRow``), and the row.
LocatedRow = tuple[str, int, dict[str, Any]]


def source_files(path: str, split: str, subset_name: str | None) -> list[Path]:
    """The files of a dataset's path, in reading order; none for a dataset of the hub or of reasoning-gym.

    Raises UserError for any other path.
    """
    if path.startswith(REASONING_GYM):
        return []
    local = Path(path).expanduser()
    if local.is_dir():
        return [file for part in split_parts(split) for file in split_files(local, part.name, subset_name)]
    if local.is_file() or local.suffix.lower() in DATA_SUFFIXES:
        return [local]
    if is_hub_name(path):
        return []
    raise UserError(f"{path}: no such file or folder, and not the name of a Hugging Face dataset")


def located_rows(path: str, split: str, subset_name: str | None) -> Iterator[LocatedRow]:
    """Every row of a dataset in order, with its location. ``split`` may be an expression such as ``train[:100]``."""
    if path.startswith(REASONING_GYM):
        source = GymSource.parse(path)
        for part in split_parts(split):
            yield from part.of([(path, number, row) for number, row in source.rows(part.name)])
        return
    if not source_files(path, split, subset_name):
        for number, row in read_hub(path, split, subset_name):
            yield path, number, row
        return
    for part in split_parts(split):
        rows = _local_rows(path, part, subset_name)
        yield from rows if part.is_whole else part.of(list(rows))


def with_nested(row: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Add to ``row`` each of ``names`` that is a dotted path into a nested column: ``reward_model.ground_truth``.

    A nested column is a mapping, or JSON text of one. A column whose own name contains the dots takes precedence.
    """
    found = {name: _nested(row, name) for name in names if "." in name and name not in row}
    return {**row, **{name: value for name, value in found.items() if value is not None}}


def _nested(row: dict[str, Any], name: str) -> Any:
    node: Any = row
    for part in name.split("."):
        if isinstance(node, str):
            try:
                node = json.loads(node)
            except NOT_JSON:
                return None
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _local_rows(path: str, part: SplitPart, subset_name: str | None) -> Iterator[LocatedRow]:
    for file in source_files(path, part.name, subset_name):
        for number, row in read_rows(file):
            yield file.name, number, row
