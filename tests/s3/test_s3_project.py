"""A project whose home is copied to S3: the results of the local run, and of a second home that continues it."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import load_file

from tests.e2e.conftest import ProjectFolder, small_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
#: One worker, because the log-probs of float32 depend on which requests the engine batches together.
ONE_WORKER = {"explorer": {"workers": {"kind": "process", "count": 1}}}


def make_project(folder: Path, tiny_model: Path, rounds: int, **changes: Any) -> ProjectFolder:
    folder.mkdir()
    document = small_config(folder, tiny_model, **ONE_WORKER, **changes)
    document["buffer"]["total_steps"] = rounds
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


def test_a_second_home_continues_and_ends_with_the_rows_and_weights_of_a_local_run(
    tmp_path: Path, tiny_model: Path, bucket: str
) -> None:
    local = make_project(tmp_path / "local", tiny_model, 3)
    local.rft("run", "--config", str(local.config))
    first = make_project(tmp_path / "stored", tiny_model, 2, store_url=bucket)
    first.rft("run", "--config", str(first.config))
    first.rft("stop")
    shutil.rmtree(first.home)

    first.config.write_text(first.config.read_text().replace("total_steps: 2", "total_steps: 3"))
    second = ProjectFolder(tmp_path / "another" / "home", first.config)
    second.rft("run", "--config", str(second.config))
    second.rft("store", "check")  # fetches what was not needed
    assert_same_rows(rows_of(second), rows_of(local))
    assert_same_weights(second, local, 3)
    assert len(second.json("trace", "r0001")) and not first.home.exists()
    second.rft("stop")
