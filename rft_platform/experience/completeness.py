"""Decide which groups of runs may train; used by exploration and by the checks of its result."""

from typing import Literal

#: Handling of a group with a failed run. ``complete``: retry the failed runs once more with all attempts, and drop the
#: group if one still fails; ``drop``: drop the group; ``partial``: keep the successful runs.
GroupPolicy = Literal["complete", "drop", "partial"]


def may_train(runs: int, repeat_times: int, policy: GroupPolicy) -> bool:
    """Whether a group with ``runs`` of the requested ``repeat_times`` runs may train."""
    return runs == repeat_times or (policy == "partial" and 0 < runs < repeat_times)
