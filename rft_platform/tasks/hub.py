"""Read the rows of a Hugging Face dataset by its name."""

import re
from collections.abc import Iterator

from rft_platform.errors import UserError
from rft_platform.tasks.readers import NumberedRow, plain

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_hub_name(path: str) -> bool:
    """Whether ``path`` can be the name of a Hugging Face dataset: ``name`` or ``owner/name``."""
    return bool(_HUB_NAME.fullmatch(path))


def read_hub(name: str, split: str, subset_name: str | None) -> Iterator[NumberedRow]:
    """Rows of the dataset, numbered from 1; without a network they come from the local cache."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"dataset {name!r} is neither a file nor a folder here, and reading it by its Hugging Face name needs "
            "the package datasets: pip install datasets"
        ) from None
    try:
        dataset = datasets.load_dataset(name, subset_name, split=split)
    except (OSError, ValueError) as error:  # not found, offline, unknown subset or split
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"dataset {name!r} (subset {subset_name!r}, split {split!r}) is neither a file nor a folder here and "
            f"could not be read from Hugging Face: {reason}. Without a network, give the path of a local copy"
        ) from None
    for number, row in enumerate(dataset, start=1):
        yield number, plain(dict(row))
