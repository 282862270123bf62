"""Names and seeds of runs: the same place in the same batch always has the same, so re-runs are idempotent."""

import hashlib

from rft_platform.experience.rounds import round_key


def group_id(round: int, batch: int, task: int) -> str:
    """The runs of the ``task``-th task of an explore batch."""
    return f"{round_key(round)}-b{batch:04d}-t{task:05d}"


def run_id(round: int, batch: int, task: int, repeat: int) -> str:
    """The ``repeat``-th run of a group; attempts at a run share its id."""
    return f"{group_id(round, batch, task)}-{repeat:03d}"


def record_key(round: int, batch: int, task: int, repeat: int) -> str:
    """The same run to an agent outside, as ``<batch>/<task>/<run>``."""
    return f"{round_key(round)}-b{batch:04d}/t{task:05d}/{repeat:03d}"


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) that depends on every part."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
