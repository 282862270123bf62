"""The judgement of one run, and the limit of its reward."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rft_platform.common.errors import UserCodeError
from rft_platform.common.policy_names import DEFAULT_POLICY

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunJudgement:
    """The judgement of one run: a reward and its parts, or the error that prevented it."""

    run_id: str
    task_id: str
    reward: float  # NaN if ``error`` is set
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)  # by policy, for policies with another reward

    def of_policy(self, policy: str) -> "RunJudgement":
        """Return the judgement with the reward of one policy."""
        return self if policy == DEFAULT_POLICY else replace(self, reward=self.rewards.get(policy, self.reward))


def refuse_beyond(runs: list[RunJudgement], most: float | None) -> list[RunJudgement]:
    """Return the judgements; a judgement whose reward is further from 0 than ``most`` becomes a failed one.

    Raises UserCodeError if no run has a usable reward left.
    """
    if most is None:
        return runs
    checked = [_within(run, most) for run in runs]
    refused = [new for new, old in zip(checked, runs, strict=True) if new is not old]
    if not refused:
        return runs
    first = f"run {refused[0].run_id} (task {refused[0].task_id}): {refused[0].error}"
    if all(run.error is not None for run in checked):
        raise UserCodeError(f"no run has a usable reward; the first invalid one: {first}")
    _log.warning(
        "the rewards of %d of %d runs are invalid; these runs are excluded; the first: %s",
        len(refused),
        len(runs),
        first,
    )
    return checked


def _within(run: RunJudgement, most: float) -> RunJudgement:
    for reward in (run.reward, *run.rewards.values()):
        if run.error is None and abs(reward) > most:
            error = (
                f"the reward is {reward:g}, beyond {most:g}: scale the rewards, or set max_abs_reward of the taskset "
                "(null: no limit)"
            )
            return RunJudgement(run.run_id, run.task_id, math.nan, error=error)
    return run
