"""Limits on the runs of a batch: concurrency, time-outs, retries, stragglers, and groups with a failed run."""

from dataclasses import dataclass, field
from typing import Literal

#: Handling of a group with a failed run. ``complete``: retry the failed runs once more with all attempts, and drop the
#: group if one still fails; ``drop``: drop the group; ``partial``: keep the successful runs.
GroupPolicy = Literal["complete", "drop", "partial"]


def may_train(runs: int, repeat_times: int, policy: GroupPolicy) -> bool:
    """Whether a group with ``runs`` of the requested ``repeat_times`` runs may train."""
    return runs == repeat_times or (policy == "partial" and 0 < runs < repeat_times)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for the slowest runs, in addition to the time-out of an attempt."""

    dynamic_ratio: float | None = None  # an attempt may take this many times the mean duration of the successful ones
    over_ratio: float = 0.0  # share of the batch's tasks that need not finish
    wait_after_min_s: float = 30.0  # seconds that the remaining runs get once enough tasks have finished


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits on the runs of workflows that call the model themselves.

    The workflow ``single_turn`` does not: the engine samples all its runs as one batch.

    ``group_policy`` defines how a group with a failed run is handled; a failed run never becomes an experience. A run
    that is stopped because of ``patience`` counts as failed, but is not retried.
    """

    concurrency: int = 32  # concurrent runs
    timeout_s: float = 1800.0  # time-out of one attempt
    max_retries: int = 2  # attempts of a run beyond the first
    truncated_reward: float | None = 0.0  # reward of a run that exceeded the context and has none; None: the run fails
    group_policy: GroupPolicy = "complete"
    patience: Patience = field(default_factory=Patience)
    max_prompt_tokens: int | None = None  # limit for workflow single_turn: a run with a longer prompt fails

    @property
    def passes(self) -> int:
        """How many times the failed runs of a batch are tried, each time with all their attempts."""
        return 2 if self.group_policy == "complete" else 1
