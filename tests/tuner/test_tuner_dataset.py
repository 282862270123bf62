"""Datasets of a tuning: what ``preview`` shows, and that it is what ``datasets.load_dataset`` would load."""

import json
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.tuner import DatasetConfig

ROWS = [{"question": "2 + 2 等于多少?", "answer": "4"}, {"question": "4 + 4 等于多少?", "answer": "8"}]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "test.jsonl").write_text('{"n": 1}\n')
    return tmp_path


def test_preview_prints_json_and_returns_the_rows(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = DatasetConfig(path=str(dataset), split="train").preview()
    printed = capsys.readouterr().out
    assert rows == ROWS
    assert printed == json.dumps(ROWS, indent=2, ensure_ascii=False) + "\n"
    assert "等于多少" in printed


def test_a_notebook_does_not_show_the_rows_twice(dataset: Path) -> None:
    from IPython.core.formatters import DisplayFormatter

    assert DisplayFormatter().format(DatasetConfig(path=str(dataset)).preview(1)) == ({}, {})


def test_preview_shows_the_first_n_of_the_split(dataset: Path) -> None:
    assert DatasetConfig(path=str(dataset)).preview(1) == ROWS[:1]
    assert DatasetConfig(path=str(dataset), split="test").preview() == [{"n": 1}]
    assert DatasetConfig(path=str(dataset), split=None).preview() == ROWS
    assert DatasetConfig(path=str(dataset), split="train[1:]+test").preview() == [ROWS[1], {"n": 1}]


def test_it_loads_what_the_datasets_library_loads(dataset: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    for split in ("train", "train[:1]", "train[50%:]"):
        theirs = datasets.load_dataset(str(dataset), data_files={"train": "train.jsonl"}, split=split)
        assert DatasetConfig(path=str(dataset), split=split).preview(10) == list(theirs)


def test_the_error_names_a_missing_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file of split 'train'"):
        DatasetConfig(path=str(tmp_path)).preview()
