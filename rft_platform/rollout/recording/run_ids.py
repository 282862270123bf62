"""Deterministic names and seeds of runs: they depend only on the run's position in its batch, so repeats are
idempotent."""

import hashlib

from rft_platform.experience.file_names import round_key


def group_id(round: int, batch: int, task: int) -> str:
    """Id of the group of runs of the ``task``-th task of an explore batch."""
    return f"{round_key(round)}-b{batch:04d}-t{task:05d}"


def run_id(round: int, batch: int, task: int, repeat: int) -> str:
    """Id of the ``repeat``-th run of a group; all attempts at the run share it."""
    return f"{group_id(round, batch, task)}-{repeat:03d}"


def record_key(round: int, batch: int, task: int, repeat: int) -> str:
    """Name of the same run for an agent outside this process, ``<batch>/<task>/<run>``."""
    return f"{round_key(round)}-b{batch:04d}/t{task:05d}/{repeat:03d}"


def derive_seed(*parts: int | str) -> int:
    """Derive a seed in [0, 2**31) that depends on every part."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
