"""Seeds of vLLM's requests: an independent random stream for each (seed, number of the prompt, choice).

vLLM itself gives every prompt of a request the same seed, and choice ``i`` the seed ``seed + i``. Equal prompts would
then get equal completions, and neighbouring seeds would share some.
"""

import hashlib

SEED_BITS = 62  # vLLM adds the choice's number, and the sum must fit a signed 64-bit integer


def prompt_seed(seed: int, prompt: int) -> int:
    """The seed to pass to vLLM for prompt number ``prompt`` of a batch."""
    digest = hashlib.blake2b(f"{seed}/{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def prompt_number(request_id: str) -> int:
    """Number of the prompt within its HTTP request, from vLLM's request id; 0 for chat, which has one prompt."""
    head, _, tail = request_id.rpartition("-")
    return int(tail) if head.startswith("cmpl-") and tail.isdigit() else 0
