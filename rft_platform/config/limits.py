"""Limits on the runs of a batch: how many at once, how long, how often, and how long for the slowest."""

from dataclasses import dataclass, field

from rft_platform.experience.completeness import GroupPolicy


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the slowest runs are waited for, besides the time-out of an attempt."""

    dynamic_ratio: float | None = None  # an attempt may take this many times the mean of those that succeeded
    over_ratio: float = 0.0  # share of the batch's tasks that need not finish
    wait_after_min_s: float = 30.0  # seconds that the other tasks get once enough have finished


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Bounds on the runs of workflows that call the model themselves; a single-turn workflow is one batch.

    ``group_policy`` says what becomes of a group with a failed run; a failed run is never an experience. A run that
    ``patience`` stops counts as failed, but is not tried again.
    """

    concurrency: int = 32  # runs at once
    timeout_s: float = 1800.0  # of one attempt
    max_retries: int = 2  # attempts of a run beyond the first
    truncated_reward: float | None = 0.0  # of a run that outgrew the context and has none; None: such a run fails
    group_policy: GroupPolicy = "complete"
    patience: Patience = field(default_factory=Patience)

    @property
    def passes(self) -> int:
        """How often the failed runs of a batch are tried, with all their attempts."""
        return 2 if self.group_policy == "complete" else 1
