"""The canary check: after every weight change, compare the engine's log-probs with the trainer's.

An engine can report a successful swap and still compute with a stale copy of one tensor (for example a tied output
head). Only a comparison of log-probs detects that, so the check is never skipped.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from rft_platform.common.errors import DamagedError, RftError, WeightMismatchError
from rft_platform.inference.interface import EngineStatus, PolicyEngine

LOG = logging.getLogger(__name__)

#: Largest accepted mean |delta log-prob| in nats, by the engine's dtype. A version with a larger mean is refused.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}


@dataclass(frozen=True, slots=True)
class Canary:
    """Token sequences and the trainer's log-probs for them (temperature 1; the first token's is 0.0)."""

    sequences: list[list[int]]
    logprobs: list[list[float]]


def check_canary(engine: PolicyEngine, canary: Canary) -> float:
    """Mean |delta log-prob| in nats between engine and trainer; WeightMismatchError if it is above the tolerance.

    Every process behind ``engine`` is compared; returns the largest mean of a process.
    """
    status = engine.status()
    tolerance = TOLERANCE[status.dtype]
    worst = 0.0
    for url, scores in engine.score_everywhere(canary.sequences).items():
        mean = mean_difference(scores, canary.logprobs)
        if not mean <= tolerance:  # also refuses NaN
            raise WeightMismatchError(
                f"policy version {status.policy_version}: the log-probs of the engine at {url} differ from the "
                f"trainer's by {mean:.3g} nats on average; at most {tolerance:g} is allowed in {status.dtype}. The "
                "engine does not serve the checkpoint's weights, so the version is refused"
            )
        worst = max(worst, mean)
    return worst


def mean_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Mean |delta log-prob| in nats over all tokens except the first of each sequence."""
    deltas = [
        abs(one - other)
        for left, right in zip(ours, theirs, strict=True)
        for one, other in zip(left[1:], right[1:], strict=True)
    ]
    return sum(deltas) / len(deltas)


def update_checked(
    engine: PolicyEngine, folder: Path, policy_version: int, canary: Canary | None, weights_digest: str | None = None
) -> float | None:
    """Load ``folder`` into the engine and run the canary check; returns the mean |delta log-prob|, None without canary.

    Raises DamagedError if the loaded weights do not have ``weights_digest``. The engine is paused during the call, so
    it samples no request with unchecked weights. After an error the engine serves the previous weights, which it kept
    or which this function restored. The engine stays paused only if the previous weights cannot be restored, or after
    an interruption: its weights are unknown until the check is repeated.
    """
    before = engine.status()
    try:
        engine.pause("wait")
        engine.update_weights(folder, policy_version)
        mean = None if canary is None else check_canary(engine, canary)
        loaded = engine.status().weights_digest  # of the loaded bytes: no second read is needed
        if weights_digest is not None and loaded != weights_digest:
            raise DamagedError(
                f"policy version {policy_version}: the weights in {folder} have digest {loaded[:16]}, those published "
                f"had {weights_digest[:16]}; restore the folder or train the round again"
            )
    except Exception:
        if _restored(engine, before):
            _resume(engine, before)
        raise
    _resume(engine, before)
    return mean


def _restored(engine: PolicyEngine, before: EngineStatus) -> bool:
    """Load the previous weights, unless the engine still has them. Returns whether the engine has them now."""
    try:
        now = engine.status()
        if (now.policy_version, now.weights_digest) != (before.policy_version, before.weights_digest):
            engine.update_weights(Path(before.weights_path), before.policy_version)
    except RftError as error:
        LOG.error("the engine stays paused, because its previous weights cannot be restored: %s", error)
        return False
    return True


def _resume(engine: PolicyEngine, before: EngineStatus) -> None:
    if not before.paused:
        engine.resume()
