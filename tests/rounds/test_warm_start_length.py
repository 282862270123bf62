"""The length of a warm start, and the demonstrations that the start of a project writes for its trainings."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.config.schema.trainer import WarmStart
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.demonstrations import EXPERTS
from rft_platform.rounds.train import experts_file
from rft_platform.rounds.warm_start import _with_steps, write_experts


def test_epochs_replace_the_number_of_steps(tmp_path: Path) -> None:
    demonstrations = tmp_path / "demonstrations.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 10}), demonstrations)
    given = WarmStart(path="unused", batch_size=4, steps=7)
    assert _with_steps(given, demonstrations).steps == 7
    assert _with_steps(given.model_copy(update={"epochs": 3}), demonstrations).steps == 8  # 30 rows of 4


def test_the_start_writes_the_demonstrations_that_all_trainings_mix_in(tmp_path: Path) -> None:
    source = tmp_path / "answers.jsonl"
    source.write_text("\n".join(json.dumps({"question": f"{i}?", "answer": str(i)}) for i in range(3)))
    config = build_config({"algorithm": {"algorithm_type": "mix", "experts": {"path": str(source)}}})
    project = Project(Home(tmp_path / "home"), config)
    write_experts(project)
    file = project.store.round_folder(0) / EXPERTS
    assert pq.read_table(file)["response"].to_pylist() == ["0", "1", "2"]
    source.write_text(json.dumps({"question": "4?", "answer": "4"}))
    write_experts(project)
    assert pq.read_table(file).num_rows == 3, "a dataset that changes after the start does not change the rounds"
    assert experts_file(project, project.settings.spec, 2) == str(file)
