"""Runs and passes per task and round, from the stored rows; task selectors use them."""

from collections.abc import Iterable

from rft_platform.experience.store import ExperienceStore

# All rows of a run carry its judgement. With several policies, the row of the first policy counts if the run has one.
# Changes that operators made to the reward are ignored: part ``judged`` keeps the judge's reward, and ``passed`` is the
# verdict of operator pass_rate_calculator.
_QUERY = """
SELECT task_id, round, count(*)::DOUBLE AS runs, sum(passed) AS passes
FROM (
    SELECT r.round, r.run_id, any_value(r.task_id) AS task_id, arg_max(coalesce(
        j.reward_parts['passed'], (coalesce(j.reward_parts['judged'], j.reward) >= ?)::DOUBLE
    ), (r.policy IS NULL, r.step)) AS passed
    FROM rollouts r JOIN judged j ON j.row_id = r.row_id AND j.round = r.round
    WHERE isfinite(j.reward)
    GROUP BY r.round, r.run_id
)
GROUP BY task_id, round ORDER BY round, task_id
"""


def task_outcomes(
    store: ExperienceStore, rounds: Iterable[int], pass_reward: float = 1.0
) -> list[tuple[str, int, float, float]]:
    """``(task_id, round, runs, passes)`` by the current judgement of some rounds; failed judgements do not count."""
    from rft_platform.experience.queries import connect  # duckdb is slow to import, and definitions import this module

    numbers = list(rounds)
    if not numbers:
        return []
    with connect(store, rounds=numbers) as connection:
        return connection.execute(_QUERY, [pass_reward]).fetchall()
