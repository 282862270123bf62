"""Convert sampling parameters and seeds to vLLM's, and vLLM's outputs to ids and log-probs.

vLLM gives every prompt of a request the same seed, and choice ``i`` the seed ``seed + i``. So equal prompts would get
equal completions, and requests with the seeds s and s + 1 would share most completions. Therefore ``prompt_seed`` gives
each pair (seed, number of the prompt) an independent random stream.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from rft_platform.common.errors import EngineError, WeightMismatchError
from rft_platform.inference.interface import Completion, FinishReason, SamplingParams

REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
SEED_BITS = 62  # vLLM adds the choice's number, and the sum must fit a signed 64-bit integer


def sampling_params(sampling: SamplingParams, prompt: int, room: int, sampled: int = 0) -> Any:
    """vLLM's parameters for prompt number ``prompt`` of a call.

    ``room``: tokens left in the context; ``sampled``: tokens of the answer that are part of the prompt.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    seed = None if sampling.seed is None else prompt_seed(sampling.seed, sampling.first_prompt + prompt)
    return VllmParams(
        n=1 if sampling.temperature == 0 else sampling.n,  # greedy completions are equal: compute one
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        max_tokens=min(sampling.max_tokens - sampled, room),
        stop=list(sampling.stop) or None,
        detokenize=bool(sampling.stop),
        logprobs=0,  # 0: log-prob of the sampled token only
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> Any:
    """vLLM's parameters for the log-probs of a sequence; vLLM always samples at least one token after it."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completions_of(output: Any, n: int) -> list[Completion]:
    """The ``n`` choices of one finished request, in order; empty ones if ``output`` is None."""
    if output is None:
        return [Completion([], [], "abort") for _ in range(n)]
    done = []
    for choice in sorted(output.outputs, key=lambda each: each.index):
        logprobs = _first_of_each(choice.logprobs, len(choice.token_ids))
        if not all(map(math.isfinite, logprobs)):
            raise EngineError("the weights that are served give log-probs that are not finite")
        if choice.finish_reason not in REASONS:
            raise EngineError(f"vLLM ended a request with {choice.finish_reason!r}; its log says why")
        done.append(Completion(list(choice.token_ids), logprobs, REASONS[choice.finish_reason]))
    return done if len(done) == n else done * n


def scores_of(output: Any) -> list[float]:
    """Log-prob of each token of a scored sequence; the first token's is 0.0."""
    count = len(output.prompt_token_ids)
    logprobs = _first_of_each(output.prompt_logprobs, count, begin=1)
    if not all(map(math.isfinite, logprobs)):
        raise WeightMismatchError("the weights that are served give log-probs that are not finite")
    return [0.0, *logprobs]


def _first_of_each(flat: Any, count: int, begin: int = 0) -> list[float]:
    """The sequence's log-probs at positions ``begin`` to ``count``: the first of each position in vLLM's flat table."""
    starts: Sequence[int] = flat.start_indices if flat is not None else []
    if len(starts) != count:
        raise EngineError(f"vLLM gave log-probs for {len(starts)} of {count} tokens")
    return [flat.logprobs[start] for start in starts[begin:]]


def prompt_seed(seed: int, prompt: int) -> int:
    """The seed to pass to vLLM for prompt number ``prompt`` of a batch."""
    digest = hashlib.blake2b(f"{seed}/{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def prompt_number(request_id: str) -> int:
    """Number of the prompt within its HTTP request, from vLLM's request id; 0 for chat, which has one prompt."""
    head, _, tail = request_id.rpartition("-")
    return int(tail) if head.startswith("cmpl-") and tail.isdigit() else 0
