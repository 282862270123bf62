"""Names of rounds: the partition key is also the folder name of the store."""


def round_key(number: int) -> str:
    """Partition key of a round: 3 -> ``r0003``."""
    return f"r{number:04d}"


def round_number(key: str) -> int:
    """Round of a partition key: ``r0003`` -> 3."""
    if len(key) < 5 or key[0] != "r" or not key[1:].isdigit():
        raise ValueError(f"round key {key!r}: expected r followed by at least four digits, as in r0003")
    return int(key[1:])
