"""Breakdown of a round's time, from the notes of its phases."""

from collections.abc import Mapping
from typing import Any

PARTS = ("rollout", "judge", "train", "evaluation")


def time_split(
    explored: Mapping[str, Any],
    judged: Mapping[str, Any],
    trained: Mapping[str, Any],
    evaluated: Mapping[str, Any],
    wall_s: float | None = None,
) -> dict[str, float]:
    """Seconds per part; ``overhead`` is the rest of the launches' total time ``wall_s``, if that is known.

    Pass an empty mapping for a missing note; its part is left out, as is the part of a note without ``seconds``.
    """
    scores = evaluated.get("metrics", {})
    measured = {
        "rollout": explored.get("seconds"),
        "judge": judged.get("seconds"),
        # Loading the weights into the engine counts as training.
        "train": sum(trained["seconds"].values()) + scores.get("deploy_s", 0.0) if trained.get("seconds") else None,
        "evaluation": scores.get("evaluation_s"),
    }
    split = {name: float(seconds) for name in PARTS if (seconds := measured[name]) is not None}
    if wall_s is not None and len(split) == len(PARTS):
        split["overhead"] = max(0.0, wall_s - sum(split.values()))
    return split
