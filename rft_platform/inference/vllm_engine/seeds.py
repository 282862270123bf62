"""Seeds of vLLM's requests: one stream of random numbers for each (seed, number of the prompt, choice).

vLLM gives every prompt of a request the same seed and choice ``i`` the seed ``seed + i``, so that equal prompts get
equal answers and neighbouring seeds share some.
"""

import hashlib

SEED_BITS = 62  # choices add to it, and it must stay within a signed 64-bit number


def prompt_seed(seed: int, prompt: int) -> int:
    """The seed that vLLM is told for prompt number ``prompt`` of a batch."""
    digest = hashlib.blake2b(f"{seed}/{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def prompt_number(request_id: str) -> int:
    """Which prompt of its HTTP request vLLM serves under this id: completions number theirs, chat has but one."""
    head, _, tail = request_id.rpartition("-")
    return int(tail) if head.startswith("cmpl-") and tail.isdigit() else 0
