"""Which groups of runs may train: the one place that says so, for exploration and for the checks of what it left."""

from typing import Literal

#: What becomes of a group with a failed run. ``complete``: the missing runs are tried once more, all attempts anew,
#: and the group is dropped if one still fails; ``drop``: it is dropped; ``partial``: what succeeded is kept.
GroupPolicy = Literal["complete", "drop", "partial"]


def may_train(runs: int, repeat_times: int, policy: GroupPolicy) -> bool:
    """Whether a group with ``runs`` runs of the ``repeat_times`` that were asked for may train."""
    return runs == repeat_times or (policy == "partial" and 0 < runs < repeat_times)
