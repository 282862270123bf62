"""Loading datasets: every format gives the same tasks, every fault is one clear line."""

import csv
import json
import logging
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.schema.buffer import Taskset
from rft_platform.rollout.runner.run_rollouts import SingleTurn
from rft_platform.tasks.dataset import find_leaks, load_tasks
from rft_platform.tasks.readers import read_rows
from rft_platform.tasks.task import Task

ROWS = [{"question": f"{a}+1", "answer": str(a + 1)} for a in range(5)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, rows: list[Any]) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [("t.jsonl", write_jsonl), ("t.json", write_json), ("t.parquet", write_parquet)],
)
def test_every_format_gives_the_same_tasks(tmp_path: Path, name: str, write: Callable[..., Path]) -> None:
    dataset = load_tasks(str(write(tmp_path / name, ROWS)), name="sums")
    reference = load_tasks(str(write_jsonl(tmp_path / "reference.jsonl", ROWS)), name="sums")
    assert dataset.tasks == reference.tasks
    assert dataset.digest == reference.digest
    assert [task.prompt for task in dataset.tasks] == [row["question"] for row in ROWS]
    assert (dataset.tasks[0].answer, dataset.tasks[0].taskset, dataset.tasks[0].raw) == ("1", "sums", ROWS[0])
    assert dataset.by_id()[dataset.tasks[3].task_id].prompt == "3+1"
    assert dataset.report.columns == ("question", "answer")


def test_columns_of_numbers_and_booleans_of_csv_files_equal_those_of_load_dataset(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text(
        'question,answer,level,share,hard,note\n"1,\n1",2,3,0.5,True,\n\nx,-4,,1,False,7b\n',
    )
    rows = list(read_rows(path))
    loaded = datasets.load_dataset("csv", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert [row for _, row in rows] == list(loaded)
    assert [number for number, _ in rows] == [3, 5]
    assert rows[0][1] == {"question": "1,\n1", "answer": 2, "level": 3.0, "share": 0.5, "hard": True, "note": None}
    assert [(task.prompt, task.answer) for task in load_tasks(str(path)).tasks] == [("1,\n1", "2"), ("x", "-4")]


def test_an_empty_cell_of_a_csv_file_makes_integers_no_floats(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("question,answer,share\n1+1,2,0.5\n2+2,4,\n3+3,,2\n")
    assert repr([row for _, row in read_rows(path)]) == repr(
        [
            {"question": "1+1", "answer": 2, "share": 0.5},
            {"question": "2+2", "answer": 4, "share": None},
            {"question": "3+3", "answer": None, "share": 2},
        ]
    )
    assert [task.answer for task in load_tasks(str(path)).tasks] == ["2", "4"]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["42", "3.5", "7"], [42, 3.5, 7]),
        (["-4", "1e-07", "0.1"], [-4, 1e-07, 0.1]),
        (["007", "8"], ["007", "8"]),
        (["1.10", "2.5"], ["1.10", "2.5"]),
        (["1e5", "7"], ["1e5", "7"]),
        (["9" * 20, "7"], ["9" * 20, "7"]),
        (["9" * 5000, "7"], ["9" * 5000, "7"]),
        (["inf", "1.5"], ["inf", "1.5"]),
        (["true", "false"], ["true", "false"]),
        (["True", "False"], [True, False]),
        (["True", "1"], ["True", "1"]),
        (["None", "NA", "null", "N/A", "nan", " "], ["None", "NA", "null", "N/A", "nan", " "]),
    ],
)
def test_answers_of_a_csv_file_keep_their_text(tmp_path: Path, cells: list[str], values: list[Any]) -> None:
    path = write_csv(tmp_path / "t.csv", [{"question": f"q{i}", "answer": cell} for i, cell in enumerate(cells)])
    assert repr([row["answer"] for _, row in read_rows(path)]) == repr(values)
    assert [task.answer for task in load_tasks(str(path)).tasks] == [cell for cell in cells if cell.strip()]


@pytest.mark.parametrize(("column", "more"), [("question", ""), ("question,answer", ",1")])
def test_blank_cells_of_a_csv_file_are_counted_and_empty_lines_are_skipped(
    tmp_path: Path, column: str, more: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f'{column}\na{more}\n   {more}\n\n""{more}\n"b\n \nc"{more}\n\n')
    dataset = load_tasks(str(path), response_key="answer" if more else None)
    assert [task.prompt for task in dataset.tasks] == ["a", "b\n \nc"]
    assert dataset.report.rows == 4 and dataset.report.dropped_rows == {"without question": ["t.csv:3", "t.csv:5"]}


def test_nan_counts_as_empty(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": float("nan")}, {"question": "b", "answer": 1.5}]
    for path in (write_jsonl(tmp_path / "t.jsonl", rows), write_parquet(tmp_path / "t.parquet", rows)):
        dataset = load_tasks(str(path))
        assert [task.answer for task in dataset.tasks] == ["1.5"] and dataset.report.dropped == {"without answer": 1}


def test_a_long_cell_of_a_csv_file_is_read(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    path = write_csv(tmp_path / "t.csv", [{"question": "q", "answer": "x" * 200_000}])
    assert len(load_tasks(str(path)).tasks[0].answer or "") == 200_000
    assert csv.field_size_limit() == before


def test_faulty_rows_are_left_out_and_reported(tmp_path: Path) -> None:
    rows = [ROWS[0], {"question": "  ", "answer": "1"}, ROWS[1], ROWS[0], {"question": "x", "answer": None}, ROWS[0]]
    dataset = load_tasks(str(write_jsonl(tmp_path / "t.jsonl", rows)))
    report = dataset.report
    assert len(dataset.tasks) == 2
    assert (report.rows, report.dropped) == (6, {"without question": 1, "without answer": 1, "duplicate": 2})
    assert report.left_out() == (
        "left out 2 duplicate (first: t.jsonl:4, t.jsonl:6), 1 without answer (first: t.jsonl:5), "
        "1 without question (first: t.jsonl:2) of 6 rows"
    )


@pytest.mark.parametrize(("name", "write"), [("t.jsonl", write_jsonl), ("t.json", write_json), ("t.csv", write_csv)])
def test_a_mark_of_the_byte_order_is_no_part_of_the_text(tmp_path: Path, name: str, write: Callable[..., Path]) -> None:
    path = write(tmp_path / name, ROWS)
    plain = [row for _, row in read_rows(path)]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [row for _, row in read_rows(path)] == plain


def test_blank_lines_do_not_shift_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n\n{"question": "", "answer": "b"}\n')
    assert load_tasks(str(path)).report.dropped_rows == {"without question": ["t.jsonl:3"]}


def test_other_columns_limit_and_tasks_without_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "n": i} for i in range(4)]
    path = str(write_jsonl(tmp_path / "t.jsonl", rows))
    assert [t.answer for t in load_tasks(path, prompt_key="prompt", response_key=None).tasks] == [None] * 4
    limited = load_tasks(path, prompt_key="prompt", response_key="n", limit=2)
    assert [task.answer for task in limited.tasks] == ["0", "1"]


def test_parquet_values_that_json_does_not_know_become_text(tmp_path: Path) -> None:
    rows = [{"question": "when", "answer": date(2024, 1, 2)}]
    assert load_tasks(str(write_parquet(tmp_path / "t.parquet", rows))).tasks[0].answer == "2024-01-02"


def test_a_folder_of_split_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "test.jsonl", ROWS[:2])
    assert len(load_tasks(str(tmp_path)).tasks) == 5
    held_out = load_tasks(str(tmp_path), split="test")
    assert len(held_out.tasks) == 2
    assert held_out.tasks[0].taskset == f"{tmp_path.name}-test"
    with pytest.raises(UserError, match=r"no file of split 'validation'.*found: test.jsonl, train.jsonl"):
        load_tasks(str(tmp_path), split="validation")


def test_a_folder_of_shards_below_a_subset(tmp_path: Path) -> None:
    data = tmp_path / "main" / "data"
    data.mkdir(parents=True)
    write_parquet(data / "train-00001-of-00002.parquet", ROWS[3:])
    write_parquet(data / "train-00000-of-00002.parquet", ROWS[:3])
    tasks = load_tasks(str(tmp_path), subset_name="main").tasks
    assert [task.prompt for task in tasks] == [row["question"] for row in ROWS]


def test_a_split_in_two_formats_is_ambiguous(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_csv(tmp_path / "train.csv", ROWS)
    with pytest.raises(UserError, match=r"train.csv, train.jsonl all hold split 'train'"):
        load_tasks(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.jsonl", '{"question": "a", "answer": "b"}\n{"question": \n', "t.jsonl, line 2: not valid JSON"),
        ("t.jsonl", "[1]\n", "t.jsonl, line 1: expected an object"),
        ("t.jsonl", "", "the dataset is empty"),
        ("t.jsonl", '{"question": "", "answer": ""}\n', "all 1 rows lack a value of question or answer"),
        ("t.jsonl", '{"Question": "a", "answer": "b"}\n', "no column 'question'.*, answer. .*did you mean 'Question'"),
        ("t.jsonl", '{"prompt": "a", "solution": "b"}\n', "format.prompt_key .* column of the question, or to null"),
        ("t.jsonl", '{"question": "a", "x": "b"}\n', "no column 'answer'; the columns are question, x. Set .*response"),
        ("t.jsonl", '{"q": "a"}\n', "'question' and no column 'answer'; .* q. Set .*prompt_key.*; set .*response_key"),
        ("t.json", '{"a": 1}', "expected a list of objects, got a dict"),
        ("t.json", '[\n{"a": 1},\n{"b" 2}]', "line 3: not valid JSON"),
        ("t.csv", "question,answer\na,b,c\n", "line 2: expected 2 fields"),
        ("t.csv", 'question,answer\n"a,b\n', "after line 1: not valid CSV"),
        ("t.parquet", "no parquet", "not a readable Parquet file"),
        ("t.jsonl", b'{"question": "\xff"}\n', "not UTF-8 text"),
    ],
)  # fmt: skip
def test_a_fault_is_one_clear_line(tmp_path: Path, name: str, content: str | bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=expected) as caught:
        load_tasks(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such data file"):
        load_tasks(str(tmp_path / "absent.jsonl"))
    with pytest.raises(UserError, match="no such file or folder, and not the name"):
        load_tasks(str(tmp_path / "absent"))


def test_a_hub_name_without_a_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match=r"'nobody/nothing'.*could not be read from Hugging Face.*local copy"):
        load_tasks("nobody/nothing")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Dataset scripts are no longer supported, but found it.py"),
        datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset"),
    ],
)
def test_a_dataset_of_the_hub_that_cannot_be_built_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=f"'nobody/nothing'.*could not be read from Hugging Face: {error}"):
        load_tasks("nobody/nothing")


def test_a_hub_that_does_not_answer_is_one_error_without_other_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    import datasets.config
    import huggingface_hub.utils._http as requests_of_hub

    nowhere, waits = "http://127.0.0.1:9", list[float]()
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", nowhere)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nowhere)
    template = nowhere + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", nowhere)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(requests_of_hub, "time", SimpleNamespace(sleep=waits.append, time=time.time))
    before = logging.getLogger("huggingface_hub").level
    with pytest.raises(UserError, match=r"'nobody/nothing'.*could not be read from Hugging Face"):
        load_tasks("nobody/nothing")
    assert waits, "requests were repeated"
    assert "'nobody/nothing' is neither a file nor a folder here: asking Hugging Face for it" in caplog.text
    assert [record.name for record in caplog.records if record.name.startswith(("huggingface", "datasets"))] == []
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("huggingface_hub").level == before


def test_the_digest_covers_order_content_and_mapping(tmp_path: Path) -> None:
    def digest(rows: list[Any], **options: Any) -> str:
        return load_tasks(str(write_jsonl(tmp_path / "t.jsonl", rows)), **options).digest

    original = digest(ROWS)
    assert digest(ROWS) == original
    assert digest(ROWS, name="renamed") == original
    assert digest(ROWS[::-1]) != original
    assert digest([*ROWS[:-1], {"question": "4+1", "answer": "6"}]) != original
    assert digest(ROWS, limit=4) != original
    assert digest(ROWS, prompt_key="answer", response_key="question") != original


def test_leaks_are_found_whatever_the_spelling(tmp_path: Path) -> None:
    train = load_tasks(str(write_jsonl(tmp_path / "train.jsonl", [{"question": "How  many Apples?", "answer": "3"}])))
    rows = [{"question": "how many apples? ", "answer": "x"}, {"question": "how many pears?", "answer": "3"}]
    held_out = load_tasks(str(write_jsonl(tmp_path / "test.jsonl", rows)))
    assert [task.answer for task in find_leaks(train.tasks, held_out.tasks)] == ["x"]
    assert find_leaks(train.tasks, held_out.tasks[1:]) == []


def test_rows_that_a_workflow_reads_whole_are_leaks_only_if_all_columns_are_equal(tmp_path: Path) -> None:
    def seeds(name: str, *numbers: int) -> tuple[Task, ...]:
        rows = [{"prompt": "Reach G.", "seed": number} for number in numbers]
        return load_tasks(str(write_jsonl(tmp_path / name, rows)), prompt_key="prompt", response_key=None).tasks

    train, held_out = seeds("train.jsonl", 1, 2, 3), seeds("test.jsonl", 7, 3, 8)
    assert [task.raw["seed"] for task in find_leaks(train, held_out, whole_rows=True)] == [3]
    assert len(find_leaks(train, held_out)) == 3
    workflows = ("environment", "frozen_lake", "tool_call", "single_turn", "my_agents:play")
    assert [Taskset(path="x", workflow=name).reads_rows for name in workflows] == [True, True, True, False, False]


def test_gsm8k_loads_from_its_folder(test_data: Path) -> None:
    train = load_tasks(str(test_data / "data" / "gsm8k"))
    held_out = load_tasks(str(test_data / "data" / "gsm8k"), split="test")
    assert (len(train.tasks), len(held_out.tasks)) == (7473, 1319)
    assert find_leaks(train.tasks, held_out.tasks) == []


def test_json_that_python_cannot_hold_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"question": "a", "answer": "b"}\n{"question": "cut \\ud83d", "answer": "b"}\n')
    with pytest.raises(UserError, match=r"tasks\.jsonl, line 2: holds '\\ud83d', half of a surrogate pair"):
        load_tasks(str(file))
    file.write_text('{"question": "a", "answer": ' + "[" * 100_000 + "}\n")
    with pytest.raises(UserError, match=r"tasks\.jsonl, line 1: not readable JSON: nested too deep"):
        load_tasks(str(file))
    file.write_text('{"question": "a", "answer": ' + "9" * 5000 + "}\n")
    with pytest.raises(UserError, match=r"tasks\.jsonl, line 1: not readable JSON: .*4300 digits"):
        load_tasks(str(file))


@pytest.mark.parametrize(("name", "write"), [("t.jsonl", write_jsonl), ("t.parquet", write_parquet)])
@pytest.mark.parametrize("as_text", [False, True])
def test_dots_lead_into_nested_columns(tmp_path: Path, name: str, write: Callable[..., Path], as_text: bool) -> None:
    def cell(value: Any) -> Any:
        return json.dumps(value) if as_text else value

    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a}+1"}],
            "reward_model": cell({"ground_truth": a + 1, "style": "rule"}),
        }
        for a in range(2)
    ]
    path = str(write(tmp_path / name, rows))
    tasks = load_tasks(path, prompt_key="prompt", response_key="reward_model.ground_truth").tasks
    assert [(task.prompt, task.answer) for task in tasks] == [("0+1", "1"), ("1+1", "2")]
    assert tasks[0].raw["reward_model.ground_truth"] == 1, "judges and classes read the row by this name"
    with pytest.raises(UserError, match=r"no column 'reward_model\.truth'; the columns are prompt, reward_model"):
        load_tasks(path, prompt_key="prompt", response_key="reward_model.truth")


def test_a_column_whose_name_has_dots_is_read_as_it_is(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "t.jsonl", [{"q": "1+1", "a.b": "2", "a": {"b": "3"}}]))
    assert load_tasks(path, prompt_key="q", response_key="a.b").tasks[0].answer == "2"


def chat(*messages: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


@pytest.mark.parametrize(("name", "write"), [("t.jsonl", write_jsonl), ("t.parquet", write_parquet)])
def test_a_chat_prompt_gives_the_texts_of_its_user_and_system_message(
    tmp_path: Path, name: str, write: Callable[..., Path]
) -> None:
    rows = [
        {"question": chat(("system", "Be brief."), ("user", "1+1")), "answer": "2"},
        {"question": chat(("user", "2+2")), "answer": "4"},
    ]
    with_system, without = load_tasks(str(write(tmp_path / name, rows))).tasks
    assert (with_system.prompt, with_system.system, without.prompt, without.system) == ("1+1", "Be brief.", "2+2", None)
    assert SingleTurn("Be polite.").messages(with_system) == rows[0]["question"]
    assert SingleTurn("Be polite.").messages(without) == chat(("system", "Be polite."), ("user", "2+2"))


def test_text_parts_of_a_chat_prompt_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
    rows = [{"question": chat(("user", parts)), "answer": "2"}]
    assert load_tasks(str(write_jsonl(tmp_path / "t.jsonl", rows))).tasks[0].prompt == "1+1"


def test_chat_prompts_without_text_of_the_user_are_empty_rows(tmp_path: Path) -> None:
    prompts = [ROWS[0]["question"], chat(("user", None)), chat(("user", " ")), chat(("system", "x"), ("user", "")), []]
    path = str(write_jsonl(tmp_path / "t.jsonl", [{"question": prompt, "answer": "1"} for prompt in prompts]))
    assert load_tasks(path).report.dropped_rows == {"without question": [f"t.jsonl:{line}" for line in (2, 3, 4, 5)]}


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (chat(("user", "a"), ("assistant", "b"), ("user", "c")), "got the roles user, assistant, user"),
        (["a"], "got the roles str"),
        ({"role": "user", "content": "a"}, "got an object"),
        (chat(("user", [{"type": "image_url"}])), "text parts only"),
    ],
)
def test_other_lists_and_objects_are_no_prompt(tmp_path: Path, prompt: Any, found: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", [ROWS[0], {"question": prompt, "answer": "1"}])
    with pytest.raises(UserError, match=rf"{tmp_path}/train\.jsonl, line 2, question: .*{found}"):
        load_tasks(str(tmp_path))
