"""The canary: after every weight change the engine must answer as the trainer does.

An engine can report a successful swap and still compute with a stale copy of one tensor (a tied output head, say).
Nothing but a comparison of log-probs sees that, so none is skipped.
"""

from dataclasses import dataclass
from pathlib import Path

from rft_platform.errors import WeightMismatchError
from rft_platform.inference.interface import EngineStatus, PolicyEngine

#: Mean |delta log-prob| in nats above which a version is refused, by the engine's number format.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}


@dataclass(frozen=True, slots=True)
class Canary:
    """Token sequences and the log-probs that the trainer gives them (temperature 1; the first token's is 0.0)."""

    sequences: list[list[int]]
    logprobs: list[list[float]]


def check_canary(engine: PolicyEngine, canary: Canary) -> float:
    """Mean |delta log-prob| in nats between engine and trainer; raises WeightMismatchError above the tolerance.

    Every process behind ``engine`` is compared; the answer is the largest of their means.
    """
    status = engine.status()
    tolerance = TOLERANCE[status.dtype]
    worst = 0.0
    for url, scores in engine.score_everywhere(canary.sequences).items():
        mean = mean_difference(scores, canary.logprobs)
        if not mean <= tolerance:  # also refuses NaN
            raise WeightMismatchError(
                f"policy version {status.policy_version}: the log-probs of the engine at {url} differ from the "
                f"trainer's by {mean:.3g} nats on average, at most {tolerance:g} is allowed in {status.dtype}; the "
                "weights it serves are not those of the checkpoint, so the version is refused"
            )
        worst = max(worst, mean)
    return worst


def mean_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Mean |delta log-prob| in nats over all tokens but the first of each sequence."""
    deltas = [
        abs(one - other)
        for left, right in zip(ours, theirs, strict=True)
        for one, other in zip(left[1:], right[1:], strict=True)
    ]
    return sum(deltas) / len(deltas)


def update_checked(engine: PolicyEngine, folder: Path, policy_version: int, canary: Canary) -> float:
    """Make the engine serve ``folder`` if it then answers as the trainer does; returns the mean |delta log-prob|.

    No request is sampled in between. On WeightMismatchError the weights served before are served again. Where anything
    else ends the check, an interruption too, the engine stays paused: nobody knows what it computes until the check is
    made again.
    """
    before = engine.status()
    engine.pause("wait")
    try:
        engine.update_weights(folder, policy_version)
        mean = _checked_or_restored(engine, canary, before)
    except WeightMismatchError:
        _resume(engine, before)
        raise
    _resume(engine, before)
    return mean


def _checked_or_restored(engine: PolicyEngine, canary: Canary, before: EngineStatus) -> float:
    try:
        return check_canary(engine, canary)
    except WeightMismatchError:
        engine.update_weights(Path(before.weights_path), before.policy_version)
        raise


def _resume(engine: PolicyEngine, before: EngineStatus) -> None:
    if not before.paused:
        engine.resume()
