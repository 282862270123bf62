"""Names of rounds: the Dagster partition key, which is also the name of the round's folder."""

import re

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
