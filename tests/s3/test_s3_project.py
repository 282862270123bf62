"""A project whose home is copied to S3: the results of the local run, and of a second home that continues it."""

import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import load_file

from rft_platform.common.errors import UserError
from rft_platform.experience.queries import connect
from rft_platform.experience.store import ExperienceStore
from rft_platform.object_store.commits import CommitLog
from rft_platform.object_store.mirror import open_mirror
from rft_platform.object_store.remote_files import RemoteFiles
from tests.e2e.conftest import ProjectFolder, small_config
from tests.experience.samples import rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
#: One worker, because the log-probs of float32 depend on which requests the engine batches together.
ONE_WORKER = {"explorer": {"workers": {"kind": "process", "count": 1}}}


def make_project(
    folder: Path, tiny_model: Path, rounds: int, taskset: dict[str, str] | None = None, **changes: Any
) -> ProjectFolder:
    folder.mkdir()
    document = small_config(folder, tiny_model, **ONE_WORKER, **changes)
    document["buffer"]["total_steps"] = rounds
    document["buffer"]["explorer_input"]["taskset"] |= taskset or {}
    file = folder / "rft.yaml"
    file.write_text(yaml.safe_dump(document))
    return ProjectFolder(folder / "home", file)


def rows_of(project: ProjectFolder) -> list[dict[str, Any]]:
    columns = ["round", "run_id", "step", "prompt_ids", "response_ids", "rollout_logprobs"]
    files = sorted((project.home / "rounds").glob("r*/rollouts/*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]
    return sorted(rows, key=lambda row: (row["round"], row["run_id"], row["step"]))


def assert_same_rows(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert ours and [{**row, "rollout_logprobs": 0} for row in ours] == [
        {**row, "rollout_logprobs": 0} for row in theirs
    ]
    for row, other in zip(ours, theirs, strict=True):
        assert row["rollout_logprobs"] == pytest.approx(other["rollout_logprobs"], abs=1e-6)


def assert_same_weights(one: ProjectFolder, other: ProjectFolder, rounds: int) -> None:
    for number in range(1, rounds + 1):
        folders = [Path(project.note(number, "policy")["folder"]) for project in (one, other)]
        ours, theirs = (load_file(folder / "model.safetensors") for folder in folders)
        assert all(abs(tensor - theirs[name]).max() <= 1e-6 for name, tensor in ours.items())


def forget_checkpoint(project: ProjectFolder, url: str, number: int) -> None:
    """Leave the store as a host leaves it that is lost before it has stored the checkpoint of a round."""
    folder = Path(project.note(number, "policy")["folder"]).relative_to(project.home.resolve()).as_posix()
    log = CommitLog(RemoteFiles(url), home="the lost host")
    known = log.read()
    log.claim(known)
    log.commit(known, {path: None for path in known.files if path.startswith(f"{folder}/")})


def test_queries_read_rows_on_s3(tmp_path: Path, bucket: str) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        open_mirror(tmp_path / name, bucket).take_over()
        store = ExperienceStore(tmp_path / name / "rounds")
        if name == "first":
            for number in (1, 2):
                store.write_rollouts(number, 0, rollouts(round=number))
                store.write_note(number, "explore", {"rows": 4})
        with connect(store) as connection:
            counted = connection.execute("SELECT round, count(*) FROM rollouts GROUP BY round ORDER BY round")
            assert counted.fetchall() == [(1, 4), (2, 4)]
    assert not store.rollout_files(1)[0].exists() and store.rollout_rows(1) == rollouts(round=1)


def test_objects_of_interrupted_uploads_are_removed_and_named_ones_stay(tmp_path: Path, bucket: str) -> None:
    (tmp_path / "home").mkdir()
    mirror = open_mirror(tmp_path / "home", bucket)
    mirror.take_over()
    store = ExperienceStore(tmp_path / "home" / "rounds")
    store.write_rollouts(1, 0, rollouts(round=1))
    store.write_note(1, "explore", {"rows": 4})
    named = {each.name for each in mirror.remote.objects("files")}
    for number in range(20):
        mirror.remote.write(f"files/rounds/r0002/{number:016x}-batch-0000.parquet", b"rows")
    found = mirror.remote.objects("files")
    assert len(found) == len(named) + 20 and all(abs(each.written_at - time.time()) < 600 for each in found)
    assert mirror.remove_orphans() == (0, 0)  # too young
    assert mirror.remove_orphans(0.0) == (20, 80)
    assert {each.name for each in mirror.remote.objects("files")} == named
    (tmp_path / "second").mkdir()
    open_mirror(tmp_path / "second", bucket).take_over()
    assert ExperienceStore(tmp_path / "second" / "rounds").rollout_rows(1) == rollouts(round=1)


def test_a_second_home_continues_and_ends_with_the_rows_and_weights_of_a_local_run(
    tmp_path: Path, tiny_model: Path, bucket: str
) -> None:
    local = make_project(tmp_path / "local", tiny_model, 3)
    local.rft("run", "--config", str(local.config))
    first = make_project(tmp_path / "stored", tiny_model, 2, store_url=bucket)
    first.rft("run", "--config", str(first.config))
    first.rft("stop")
    forget_checkpoint(first, bucket, 2)
    shutil.rmtree(first.home)

    first.config.write_text(first.config.read_text().replace("total_steps: 2", "total_steps: 3"))
    second = ProjectFolder(tmp_path / "another" / "home", first.config)
    continued = second.rft("run", "--config", str(second.config))
    assert "the training of r0002 is repeated" in continued.stderr
    second.rft("store", "check")  # fetches what was not needed
    assert_same_rows(rows_of(second), rows_of(local))
    assert_same_weights(second, local, 3)
    assert len(second.json("trace", "r0001")) and not first.home.exists()
    second.rft("stop")


def test_a_missing_bucket_is_refused(tmp_path: Path, s3_endpoint: str) -> None:
    (tmp_path / "home").mkdir()
    with pytest.raises(UserError, match="create the bucket"):
        open_mirror(tmp_path / "home", "s3://no-such-bucket/project").take_over()
