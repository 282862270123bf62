"""Checks of the data: each finds its fault and nothing else."""

import math
from typing import Any

import pytest

from rft_platform.assets.checks import experience_results
from rft_platform.experience.quality import (
    JUDGED_COLUMNS,
    ROLLOUT_COLUMNS,
    RolloutQuality,
    check_judged,
    check_rollouts,
    zero_variance_share,
)
from rft_platform.experience.record import RolloutRow
from rft_platform.experience.schema import JUDGED_SCHEMA, ROLLOUT_SCHEMA, judged_to_table, rows_to_table

from .samples import judged, rollouts


def check(rows: list[RolloutRow], repeats: int = 2) -> RolloutQuality:
    return check_rollouts(rows_to_table(rows).select(ROLLOUT_COLUMNS), repeats)


def test_sound_rollouts() -> None:
    quality = check(rollouts())
    assert quality == RolloutQuality(4, (), (), (), (), (), (4,), 0.0) and quality.sound


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"rollout_logprobs": [-0.5]}, "unequal_lengths"),
        ({"rollout_logprobs": [-0.5, math.nan, 0.0]}, "bad_logprobs"),
        ({"rollout_logprobs": [-0.5, -math.inf, 0.0]}, "bad_logprobs"),
        ({"rollout_logprobs": [-0.5, 0.5, 0.0]}, "bad_logprobs"),
        ({"response_ids": [], "rollout_logprobs": [], "loss_mask": []}, "empty_responses"),
        ({"row_id": rollouts()[0].row_id}, "duplicate_rows"),
    ],
)
def test_faults_name_their_rows(changes: dict[str, Any], fault: str) -> None:
    bad = rollouts(**changes)[1]
    quality = check([rollouts()[0], bad, *rollouts()[2:]])
    assert getattr(quality, fault) == (bad.row_id,)
    assert not quality.sound
    others = {"unequal_lengths", "bad_logprobs", "empty_responses", "duplicate_rows"} - {fault}
    assert all(getattr(quality, other) == () for other in others)


def test_groups_versions_and_truncation() -> None:
    rows = rollouts(3)[:-1]
    rows[0].call.policy_version, rows[0].truncated = 3, True
    quality = check(rows)
    assert quality.incomplete_groups == (rows[-1].group_id,)
    assert (quality.policy_versions, quality.truncated_share) == ((3, 4), 0.2)
    assert quality.sound  # whether this may train is for the caller to say


def test_judgement_against_its_rollouts() -> None:
    rows = rollouts()
    judgements = judged(rows)[1:]
    judgements[0].reward, judgements[1].dropped_by, judgements[2].row_id = math.nan, "std_threshold", "stranger"
    quality = check_judged(judged_to_table(judgements).select(JUDGED_COLUMNS), rows_to_table(rows).select(["row_id"]))
    assert quality.non_finite == (rows[1].row_id,)
    assert quality.unjudged == (rows[0].row_id, rows[3].row_id)
    assert quality.orphans == ("stranger",)
    assert quality.dropped_share == pytest.approx(1 / 3) and not quality.sound
    whole = check_judged(judged_to_table(judged(rows)), rows_to_table(rows))
    assert whole.sound and whole.zero_variance_share == 0.0


def test_runs_on_which_the_judge_failed_are_named() -> None:
    rows = rollouts()
    judgements = judged(rows)
    for row in judgements[:2]:
        row.reward, row.dropped_by, row.judge_error = math.nan, "judge_error", "KeyError: 'no such shop'"
    quality = check_judged(judged_to_table(judgements), rows_to_table(rows))
    assert quality.judge_errors == 2 and quality.sound
    assert quality.first_judge_errors == (rows[0].row_id, rows[1].row_id)
    failed = [result for result in experience_results(check(rows), quality, []) if not result.passed]
    assert [(result.check_name, result.severity.value) for result in failed] == [("judge_succeeded", "WARN")]


def test_zero_variance_counts_groups_by_their_runs_last_step() -> None:
    rows = rollouts(4, 2)
    judgements = judged(rows)
    for judgement in judgements[:2]:
        judgement.reward = 0.3  # the first of four groups: all alike
    first_step = judged(rows[:1], reward=0.9)[0]
    first_step.step, judgements[0].step = 0, 1  # an earlier step does not count
    assert zero_variance_share(judged_to_table([judgements[0], first_step, *judgements[1:]])) == 0.25


def test_a_round_without_rows_has_no_defects() -> None:
    assert check([]) == RolloutQuality(0, (), (), (), (), (), (), 0.0)
    assert check_judged(JUDGED_SCHEMA.empty_table(), ROLLOUT_SCHEMA.empty_table()).sound
