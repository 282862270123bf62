"""Split expressions and file names as ``datasets.load_dataset`` understands them; tasks without fixed columns."""

import json
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.tasks.dataset import load_tasks
from rft_platform.tasks.readers import SplitPart, split_parts
from rft_platform.tasks.sources import located_rows


def write(file: Path, *values: int) -> None:
    file.write_text("".join(json.dumps({"n": value}) + "\n" for value in values))


def numbers(folder: Path, split: str) -> list[int]:
    return [row["n"] for _, _, row in located_rows(str(folder), split, None)]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", list(range(10))),
        ("train[:3]", [0, 1, 2]),
        ("train[20%:50%]", [2, 3, 4]),
        ("train[-2:]", [8, 9]),
        ("train[:1]+test", [0, 100, 101]),
    ],
)
def test_a_split_may_be_an_expression(tmp_path: Path, split: str, expected: list[int]) -> None:
    write(tmp_path / "train.jsonl", *range(10))
    write(tmp_path / "test.jsonl", 100, 101)
    assert numbers(tmp_path, split) == expected


def test_a_slice_of_one_file_is_cut_too(tmp_path: Path) -> None:
    write(tmp_path / "anything.json", *range(4))  # JSON lines under another name
    assert numbers(tmp_path / "anything.json", "train[1:3]") == [1, 2]


@pytest.mark.parametrize("split", ["train[", "train[a:b]", "", "train[1:2:3]", "train +"])
def test_an_invalid_split_is_refused(split: str) -> None:
    with pytest.raises(UserError, match=r"expected the name of a split.*train\[:100\]"):
        split_parts(split)


def test_percentages_are_rounded_to_the_nearest_row() -> None:
    assert SplitPart("train", "33%", "67%").of(range(10)) == range(3, 7)


@pytest.mark.parametrize(
    ("name", "split", "found"),
    [
        ("my_dev.jsonl", "validation", True),
        ("questions-eval.jsonl", "test", True),
        ("restrain.jsonl", "train", True),  # no word of any split: all of it is train
        ("contest.jsonl", "test", False),
        ("Test.jsonl", "test", True),
        ("My_TRAINING.jsonl", "train", True),
    ],
)
def test_the_split_of_a_file_follows_from_its_name(tmp_path: Path, name: str, split: str, found: bool) -> None:
    write(tmp_path / name, 7)
    if found:
        assert numbers(tmp_path, split) == [7]
    else:
        with pytest.raises(UserError, match="no file of split 'test'"):
            numbers(tmp_path, split)


def test_the_case_of_a_file_name_does_not_matter_to_its_split(tmp_path: Path) -> None:
    write(tmp_path / "Train.jsonl", 1)
    write(tmp_path / "Test.jsonl", 2)
    assert (numbers(tmp_path, "train"), numbers(tmp_path, "test")) == ([1], [2])


def test_files_that_describe_a_folder_are_no_data(tmp_path: Path) -> None:
    write(tmp_path / "tasks.jsonl", 1)
    for name in ("config.json", "dataset_info.json"):
        (tmp_path / name).write_text('{"n": 2}\n')
    assert numbers(tmp_path, "train") == [1]


def test_a_subset_that_a_folder_lacks_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", 1)
    (tmp_path / "main").mkdir()
    with pytest.raises(UserError, match=r"subset_name is 'socratic', expected one of its subfolders; found: main\."):
        load_tasks(str(tmp_path), subset_name="socratic")


def test_tasks_need_no_fixed_columns(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": "ü"}\n{"b": [1, 2]}\n')
    loaded = load_tasks(str(tmp_path), prompt_key=None, response_key=None)
    assert [task.raw for task in loaded.tasks] == [{"a": "ü"}, {"b": [1, 2]}]
    assert [task.answer for task in loaded.tasks] == [None, None]
    assert loaded.tasks[0].prompt == '{"a": "ü"}'
