"""Names of round folders and of the rollout files in them.

A round's folder is named by its Dagster partition key. A rollout file's name says which explore batches it holds.
"""

import re
from collections.abc import Iterable

_KEY = re.compile(r"r(?:[0-9]{4}|[1-9][0-9]{4,})")


def round_key(number: int) -> str:
    """Partition key of a round: 3 -> ``r0003``."""
    return f"r{number:04d}"


def is_round_key(key: str) -> bool:
    """Whether ``key`` is the name of a round; ``r3`` and ``r00003`` are not."""
    return _KEY.fullmatch(key) is not None


def round_number(key: str) -> int:
    """Round number of a partition key: ``r0003`` -> 3. Raises ValueError for anything else."""
    if not is_round_key(key):
        raise ValueError(f"round key {key!r}: expected r followed by at least four digits, as in r0003")
    return int(key[1:])


# A file has the number of one batch or, after compaction, of a range.
_BATCHES = re.compile(r"batch-(\d{4,})(?:-(\d{4,}))?\.parquet")


def batch_file(batch: int) -> str:
    """File name of an explore batch when it is first written."""
    return f"batch-{batch:04d}.parquet"


def merged_file(batches: range) -> str:
    """File name of several batches in one file."""
    return f"batch-{batches[0]:04d}-{batches[-1]:04d}.parquet"


def is_batch_file(name: str) -> bool:
    """Whether a file name is the name of a rollout file."""
    return _BATCHES.fullmatch(name) is not None


def batches_in(name: str) -> range:
    """Numbers of the explore batches that a rollout file holds."""
    match = _BATCHES.fullmatch(name)
    if match is None:
        raise ValueError(f"{name}: expected the name of a rollout file, such as batch-0000.parquet")
    first = int(match[1])
    return range(first, int(match[2] or first) + 1)


def without_doubles(names: Iterable[str]) -> list[str]:
    """The files in batch order, without those whose batches a merged file also holds."""
    kept: list[str] = []
    for name in sorted(filter(is_batch_file, names), key=lambda name: (-len(batches_in(name)), name)):
        if not any(set(batches_in(name)) & set(batches_in(other)) for other in kept):
            kept.append(name)
    return sorted(kept, key=lambda name: batches_in(name)[0])
