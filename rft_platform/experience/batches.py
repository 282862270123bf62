"""Names of rollout files: which explore batches a file holds."""

import re
from collections.abc import Iterable

# One batch; or several in one file, once they were compacted; and ``.v2`` once an older schema's rows were rewritten.
_BATCHES = re.compile(r"batch-(\d{4,})(?:-(\d{4,}))?(?:\.v(\d+))?\.parquet")


def batch_file(batch: int) -> str:
    """Name of the file of an explore batch as it is first written."""
    return f"batch-{batch:04d}.parquet"


def merged_file(batches: range, schema_version: int) -> str:
    """Name of the file that some batches were rewritten into; never one that ``batch_file`` gives."""
    return f"batch-{batches[0]:04d}-{batches[-1]:04d}.v{schema_version}.parquet"


def is_batch_file(name: str) -> bool:
    """Whether a file name is that of a rollout file."""
    return _BATCHES.fullmatch(name) is not None


def batches_in(name: str) -> range:
    """Numbers of the explore batches that a rollout file holds."""
    match = _BATCHES.fullmatch(name)
    if match is None:
        raise ValueError(f"{name}: expected the name of a rollout file, such as batch-0000.parquet")
    first = int(match[1])
    return range(first, int(match[2] or first) + 1)


def without_doubles(names: Iterable[str]) -> list[str]:
    """Of files that hold the same batches, the one that was made of the others; in batch order."""
    kept: list[str] = []
    for name in sorted(filter(is_batch_file, names), key=lambda name: (-len(batches_in(name)), -_version(name), name)):
        if not any(set(batches_in(name)) & set(batches_in(other)) for other in kept):
            kept.append(name)
    return sorted(kept, key=lambda name: batches_in(name)[0])


def _version(name: str) -> int:
    match = _BATCHES.fullmatch(name)
    return int(match[3] or 0) if match else 0
