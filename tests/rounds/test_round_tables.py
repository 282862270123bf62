"""Rounds as data frames, without Dagster."""

from pathlib import Path

import pytest

import rft_platform
from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.record import Policy, RoundEvaluation, publish, write
from rft_platform.rounds.reporting.round_tables import as_frame, round_table
from tests.experience.samples import judged, rollouts


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    """Two explored rounds; the first is judged and evaluated."""
    made = ExperienceStore(Home(tmp_path).rounds)
    for number in (1, 2):
        made.write_rollouts(number, 0, rollouts(round=number))
    made.write_judged(1, "exact@1", judged(made.rollout_rows(1)))
    publish(made, Policy("f", 4, "digest", 1, model_version="3"))
    write(made, 1, RoundEvaluation("better", promoted=True, metrics={"sampled_pass": 0.5, "greedy_pass": 0.75}))
    return made


def test_a_round_is_a_frame_of_its_rows_with_rewards(store: ExperienceStore) -> None:
    frame = rft_platform.load_round(store.home, 1)
    assert set(frame["round"]) == {1} and set(frame["judge_version"]) == {"exact@1"}
    assert frame.set_index("row_id")["reward"].to_dict() == {row.row_id: row.reward for row in judged(rollouts())}
    assert isinstance(frame["reward_parts"][0], dict) and frame["response_ids"][0].dtype == "int32"


def test_several_rounds_are_one_table_and_rounds_without_data_are_left_out(store: ExperienceStore) -> None:
    assert as_frame(round_table(store, "rollout_batches", [1, 2, 3]))["round"].value_counts().to_dict() == {1: 4, 2: 4}
    (report,) = round_table(store, "evaluation_report", [1, 2]).to_pylist()
    about = {"round": 1, "policy_version": 4, "model_version": "3", "promoted": True, "gate": "better"}
    assert report == {**about, "sampled_pass": 0.5, "greedy_pass": 0.75}


def test_a_round_that_does_not_exist_is_refused(store: ExperienceStore, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"r0009: .* has no judged_experiences of it; its rounds are r0001 to r0002"):
        rft_platform.load_round(store.home, 9)
    with pytest.raises(UserError, match="it has no rounds"):
        rft_platform.load_round(tmp_path / "elsewhere", 1)
