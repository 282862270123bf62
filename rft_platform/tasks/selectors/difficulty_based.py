"""Select the tasks with the most useful difficulty, by a Beta posterior over the pass rate of every task.

Runs of a task pass with an unknown rate p. With prior Beta(a, b), s passes and f failures the posterior is Beta(a + s,
b + f). The variance of a group's rewards, p (1 - p), and with it the gradient, is largest at p = 1/2.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rft_platform.algorithms.common.registry import Share
from rft_platform.common.errors import UserError
from rft_platform.tasks.selectors.pass_history import History
from rft_platform.tasks.selectors.selector_registry import Chosen, Moment, selector
from rft_platform.tasks.task import Task

Positive = Annotated[float, Field(gt=0)]


@selector("difficulty_based")
def difficulty_based(
    tasks: Sequence[Task],
    moment: Moment,
    history: History,
    *,
    target: Share = 0.5,
    how: Literal["thompson", "probability"] = "thompson",
    width: Annotated[float, Field(gt=0, le=1)] = 0.2,
    prior_alpha: Positive = 1.0,
    prior_beta: Positive = 1.0,
    prior_runs: Positive = 2.0,
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0,
    pass_reward: float = 1.0,
) -> Chosen:
    """The tasks whose pass rate is most probably near ``target``. A round repeats a task only if it has too few tasks.

    ``how: thompson`` ranks by the distance between ``target`` and one draw from each posterior, so that tasks with few
    runs are explored. ``probability`` ranks by the posterior probability of a rate within ``width`` of the target. Only
    outcomes up to the round that trained the exploring policy count; older rounds are weighted by ``decay`` per round,
    because the policy has changed since. The first of ``feature_keys``, if any, is a column with an expected pass rate,
    which counts as ``prior_runs`` runs. Ties are broken at random by seed and round.
    """
    passes_T, failures_T = history.outcomes(moment.step, pass_reward).totals(len(tasks), decay)
    expected_T, weight = _expected(tasks, moment.feature_keys), prior_runs if moment.feature_keys else 0.0
    alpha_T = prior_alpha + weight * expected_T + passes_T
    beta_T = prior_beta + weight * (1 - expected_T) + failures_T
    generator = np.random.default_rng([moment.seed, moment.round])
    tie_T = generator.permutation(len(tasks))
    near_T = near(alpha_T, beta_T, target, width)
    cost_T = np.abs(generator.beta(alpha_T, beta_T) - target) if how == "thompson" else -near_T
    ranked = np.lexsort((tie_T, cost_T))
    start = moment.round_first
    chosen = ranked[np.arange(start, start + moment.count) % len(tasks)]
    tried_T = passes_T + failures_T > 0
    return Chosen(
        chosen.tolist(),
        {
            "tried_tasks": float(tried_T.sum()),
            "selected_tried": float(tried_T[chosen].sum()),
            "selected_pass_rate": float((alpha_T / (alpha_T + beta_T))[chosen].mean()),
            "selected_near_target": float(near_T[chosen].mean()),
        },
    )


def near(alpha: np.ndarray, beta: np.ndarray, target: float, width: float) -> np.ndarray:
    """Probability that a Beta(alpha, beta) variable is within ``width`` of ``target``, rounded to 12 digits."""
    from scipy.special import betainc  # type: ignore[import-untyped]

    high, low = betainc(alpha, beta, min(target + width, 1.0)), betainc(alpha, beta, max(target - width, 0.0))
    return np.round(high - low, 12)  # equal posteriors tie, regardless of rounding errors


def _expected(tasks: Sequence[Task], feature_keys: Sequence[str]) -> np.ndarray:
    if not feature_keys:
        return np.zeros(len(tasks))
    values = [task.raw.get(feature_keys[0]) for task in tasks]
    try:
        rates = np.array(values, np.float64)
    except (TypeError, ValueError):
        rates = np.full(len(tasks), np.nan)
    if not ((rates >= 0) & (rates <= 1)).all():
        raise UserError(
            f"task_selector.feature_keys: column {feature_keys[0]!r} must hold an expected pass rate from 0 to 1 of "
            "every task; leave it out, or use selector_type: easy_to_hard"
        )
    return rates
