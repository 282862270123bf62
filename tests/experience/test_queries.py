"""DuckDB views: over files, and before there are any; the transcripts of a round."""

import math
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_platform.common.errors import StorageError
from rft_platform.common.files import write_sealed_json
from rft_platform.experience.queries import connect, mean_reward_by_round, rows_that_trained, task_outcomes
from rft_platform.experience.store import ExperienceStore
from rft_platform.experience.transcripts import rollout_transcripts

from .samples import judged, rollouts

VIEWS_WITH_REWARDS = [
    ("judged", "reward"), ("judgements", "reward"), ("experiences", "reward"), ("conversations", "total_reward"),
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    return ExperienceStore(tmp_path / "it's here" / "rounds")


def test_views_without_files(store: ExperienceStore, tmp_path: Path) -> None:
    connection = connect(store, tmp_path / "checkpoints")
    for view in ("rollouts", "judgements", "judged", "experiences", "checkpoints"):
        assert connection.execute(f"SELECT count(*) FROM {view}").fetchall() == [(0,)]
    assert mean_reward_by_round(connection) == []
    assert rows_that_trained(connection, 1) == [] == rollout_transcripts(store, 1, 3)


def test_names_of_folders_are_no_columns(tmp_path: Path) -> None:
    store = ExperienceStore(tmp_path / "lr=1e-6" / "round=7" / "rounds")
    rows = rollouts()
    store.write_rollouts(1, 0, rows)
    store.write_judged(1, "v", judged(rows, "v"))
    with connect(store) as connection:
        for view in ("rollouts", "judged"):
            found = connection.sql(f"SELECT * FROM {view}").to_arrow_table()
            assert "lr" not in found.column_names and found["round"].to_pylist() == [1] * 4
    assert {number for _, number, _, _ in task_outcomes(store, [1])} == {1}


def test_rewards_by_round(store: ExperienceStore) -> None:
    for number in (1, 2):
        rows = rollouts(round=number)
        store.write_rollouts(number, 0, rows)
        store.write_judged(number, "old", judged(rows, "old", reward=9.0))
        store.write_judged(number, "new", judged(rows, "new", reward=float(number)))
    store.write_rollouts(3, 0, rollouts(round=3))  # not judged yet
    assert mean_reward_by_round(connect(store)) == [
        {"round": 1, "runs": 4, "mean_reward": 1.0, "std_reward": 0.0},
        {"round": 2, "runs": 4, "mean_reward": 2.0, "std_reward": 0.0},
    ]
    unjudged = connect(store).execute("SELECT count(*) FROM experiences WHERE reward IS NULL").fetchall()
    assert unjudged == [(4,)]


def test_runs_that_the_judge_failed_on_have_no_reward_and_filtered_ones_have(store: ExperienceStore) -> None:
    rows = judged(rollouts(), reward=1.0)
    rows[0].reward, rows[0].dropped_by = float("nan"), "judge_error"
    rows[1].reward, rows[1].dropped_by = 0.0, "zero_variance"
    store.write_rollouts(1, 0, rollouts())
    store.write_judged(1, "exact@1", rows)
    (found,) = mean_reward_by_round(connect(store))
    assert (found["runs"], found["mean_reward"]) == (3, 2 / 3)


def test_rounding_of_a_sum_of_weights_does_not_fail_a_run(store: ExperienceStore) -> None:
    for number, reward in enumerate((0.7 + 0.2 + 0.1, 0.999), start=1):
        rows = rollouts(round=number)
        store.write_rollouts(number, 0, rows)
        store.write_judged(number, "v", judged(rows, "v", reward=reward))
    found = {number: (runs, passes) for _, number, runs, passes in task_outcomes(store, [1, 2])}
    assert found[1][0] == found[1][1] > 0.0 and found[2][0] > found[2][1] == 0.0


def test_a_missing_reward_is_null_in_every_view(store: ExperienceStore) -> None:
    for number in (1, 2):
        rows = judged(rollouts(round=number), reward=1.0)
        rows[0].reward, rows[0].dropped_by = math.nan, "judge_error"
        store.write_rollouts(number, 0, rollouts(round=number))
        store.write_judged(number, "exact@1", rows)
    assert [row.reward for row in store.judged_rows(2)][1:] == [1.0, 1.0, 1.0]
    with connect(store) as connection:
        for view, column in VIEWS_WITH_REWARDS:
            query = f"SELECT avg({column}), count(*) - count({column}) FROM {view} GROUP BY round"
            assert connection.execute(query).fetchall() == [(1.0, 1), (1.0, 1)]
        assert [run["reward"] for run in rollout_transcripts(store, 2, 9)] == [1.0, 1.0, 1.0, None]


def test_the_document_lists_all_views_and_their_columns(store: ExperienceStore) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "store.md").read_text(encoding="utf-8")
    section = text.partition("\n## Views\n")[2].partition("\n## ")[0]
    documented = {
        name: re.findall(r"`(\w+)`", "".join(re.findall(r"^\| ([^|]+) \|", rows, re.MULTILINE)))
        for name, rows in re.findall(r"^### `(\w+)`\n(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL)
    }
    with connect(store) as connection:
        names = [row[0] for row in connection.execute("SHOW TABLES").fetchall()]
        actual = {name: [row[0] for row in connection.execute(f"DESCRIBE {name}").fetchall()] for name in names}
    inherited = documented["rollouts"] + documented["judged"]
    documented["experiences"] = [name for name in actual["experiences"] if name in inherited]
    assert documented == actual


def test_a_folder_of_judgements_is_not_read_as_one_table(store: ExperienceStore) -> None:
    rows = rollouts()
    store.write_rollouts(1, 0, rows)
    for version in ("old", "new"):
        path = store.write_judged(1, version, judged(rows, version))
    with pytest.raises(pa.ArrowInvalid, match=r"current\.json"):
        pq.read_table(path.parent)


def test_rows_that_trained_follow_the_manifest(store: ExperienceStore, tmp_path: Path) -> None:
    rows = rollouts()
    store.write_rollouts(1, 0, rows)
    trained = judged(rows, "then")
    trained[0].dropped_by = "std_threshold"
    store.write_judged(1, "then", trained)
    store.write_judged(1, "now", judged(rows, "now"))  # a later judge does not change what trained
    checkpoints = tmp_path / "checkpoints"
    assert rows_that_trained(connect(store, checkpoints), 1) == []
    manifest = {"policy_version": 4, "lineage": {"round": 1, "judge_version": "then"}}
    write_sealed_json(checkpoints / "project" / "name" / "global_step_4" / "manifest.json", manifest)
    found = rows_that_trained(connect(store, checkpoints), 1)
    assert [row["row_id"] for row in found] == [row.row_id for row in rows[1:]]
    assert {row["judge_version"] for row in found} == {"then"}


def test_transcripts_reach_from_best_to_worst(store: ExperienceStore) -> None:
    rows = rollouts(5, 2)
    store.write_rollouts(1, 0, rows)
    store.write_judged(1, "v", judged(rows, "v"))
    shown = rollout_transcripts(store, 1, 3)
    assert [run["reward"] for run in shown] == [1.0, 1.0, 0.0]
    assert shown[0]["messages"] == [{"role": "user", "content": "Größe 0?"}]
    assert shown[0]["run_output"] == {"answer": [0, None]} and shown[0]["steps"] == 1
    assert rollout_transcripts(store, 1, 3) == shown
    assert len(rollout_transcripts(store, 1, 99)) == 10


def test_a_transcript_shows_the_last_step_of_a_run(store: ExperienceStore) -> None:
    first, second, other = rollouts(1, 3)
    second.run_id, second.step = first.run_id, 1
    store.write_rollouts(1, 0, [second, first, other])
    shown = rollout_transcripts(store, 1, 9)
    assert [(run["run_id"], run["steps"], run["reward"]) for run in shown] == sorted(
        [(first.run_id, 2, None), (other.run_id, 1, None)]
    ), "without a judgement there is no reward"
    assert shown[0]["response"] == (second if shown[0]["run_id"] == first.run_id else other).call.response


def test_a_corrupt_file_is_named(store: ExperienceStore, tmp_path: Path) -> None:
    store.write_rollouts(1, 0, rollouts()).write_bytes(b"no parquet")
    with pytest.raises(StorageError, match=r"batch-0000\.parquet"):
        connect(store)
    manifest = tmp_path / "checkpoints" / "global_step_1" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{half")
    with pytest.raises(StorageError, match=r"manifest\.json"):
        connect(ExperienceStore(tmp_path / "none"), tmp_path / "checkpoints")
