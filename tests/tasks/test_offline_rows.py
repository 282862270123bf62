"""Offline datasets: what becomes of every form of a row, and how each fault is named."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_platform.common.errors import UserError
from rft_platform.tasks.offline_dataset import Columns, OfflineDataset, load_conversations, load_pairs
from tests.support.builders import write_rows

USER, GOOD, BAD = (
    {"role": "user", "content": "1+1=?"},
    {"role": "assistant", "content": "2"},
    {"role": "assistant", "content": "3"},
)


def conversations(folder: Path, rows: list[dict[str, Any]], **columns: Any) -> OfflineDataset:
    return load_conversations(write_rows(folder / "train.jsonl", rows), Columns(**columns))


def pairs(folder: Path, rows: list[dict[str, Any]], **columns: Any) -> OfflineDataset:
    return load_pairs(write_rows(folder / "train.jsonl", rows), Columns(**columns))


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": [USER, GOOD]}, {}),
        ({"messages": json.dumps([USER, GOOD])}, {}),
        ({"chat": [USER, GOOD]}, {"messages": "chat"}),
        ({"prompt": "1+1=?", "response": "2"}, {}),
        ({"prompt": "1+1=?", "completion": "2"}, {}),
        ({"prompt": [USER], "completion": [GOOD]}, {}),
        ({"prompt": json.dumps([USER]), "completion": json.dumps([GOOD])}, {"prompt_type": "chatpair"}),
        ({"prompt": json.dumps([USER]), "completion": json.dumps([GOOD])}, {}),
        ({"question": "1+1=?", "answer": "2"}, {"prompt": "question", "response": "answer"}),
        ({"prompt": "1+1=?", "response": "2", "messages": [USER, BAD]}, {"prompt_type": "plaintext"}),
    ],
)
def test_every_form_of_a_demonstration_is_the_same_conversation(tmp_path, row, columns):
    found = conversations(tmp_path, [row], **columns)
    assert found.rows == ({"messages": [USER, GOOD]},)
    assert found.places == (("train.jsonl", 1),)


@pytest.mark.parametrize(
    ("row", "columns", "label"),
    [
        ({"prompt": "1+1=?", "completion": "2", "label": True}, {}, True),
        ({"prompt": [USER], "completion": [GOOD], "label": 1}, {}, True),
        ({"prompt": "1+1=?", "response": "2", "label": "False"}, {}, False),
        ({"q": "1+1=?", "a": "2", "thumbs_up": 0.0}, {"prompt": "q", "response": "a", "label": "thumbs_up"}, False),
        ({"prompt": "1+1=?", "completion": "2", "label": True, "chosen": "2"}, {}, True),
    ],
)
def test_an_answer_with_a_label_needs_no_partner(tmp_path, row, columns, label):
    found = pairs(tmp_path, [row, dict.fromkeys(row)], **columns)
    assert found.rows == ({"prompt": [USER], "completion": [GOOD], "label": label},)
    assert found.report.dropped == {"empty": 1}


def test_pairs_as_json_text_are_messages_and_other_text_is_kept(tmp_path):
    pair = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    whole = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    text = {"prompt": "[1, 2]", "chosen": '[{"a": 1}]', "rejected": "[]"}
    rows = [{name: json.dumps(value) for name, value in row.items()} for row in (pair, whole)]
    assert pairs(tmp_path, rows[:1]).rows == pairs(tmp_path, rows[1:]).rows == (pair,)
    (found,) = pairs(tmp_path, [text]).rows
    assert [found[name][0]["content"] for name in ("prompt", "chosen", "rejected")] == list(text.values())
    (plain,) = pairs(tmp_path, rows[:1], prompt_type="plaintext").rows
    assert plain["prompt"] == [{"role": "user", "content": rows[0]["prompt"]}]


def test_dots_lead_into_nested_columns_of_an_offline_dataset(tmp_path):
    row = {"data": {"question": "1+1=?", "answers": '{"good": "2", "bad": "3"}'}}
    named = {"prompt": "data.question", "chosen": "data.answers.good", "rejected": "data.answers.bad"}
    assert pairs(tmp_path, [row], **named).rows == ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},)
    with pytest.raises(UserError, match=r"expected 'data\.question', 'data\.answers\.good', 'data\.answers\.worse'"):
        pairs(tmp_path, [row], **{**named, "rejected": "data.answers.worse"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+1=?", "completion": "2", "label": 0.5}, "train.jsonl:1, label: 0.5; expected true or 1"),
        (
            {"prompt": "1+1=?", "answer": "2", "label": True},
            "expected 'prompt' with 'response' or 'completion' and 'label'",
        ),
        ({"prompt": "1+1=?", "completion": "2"}, "'chosen', 'rejected'; or for kto 'prompt', 'completion', 'label'"),
    ],
)
def test_what_is_no_labelled_answer_is_refused(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        pairs(tmp_path, [row])


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "1+1=?", "chosen": "2", "rejected": "3"}, {}),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "1+1=?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"q": "1+1=?", "yes": "2", "no": "3"}, {"prompt": "q", "chosen": "yes", "rejected": "no"}),
    ],
)
def test_every_form_of_a_pair_is_the_same_pair(tmp_path, row, columns):
    assert pairs(tmp_path, [row], **columns).rows == ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},)


def test_a_number_is_its_text(tmp_path):
    assert conversations(tmp_path, [{"prompt": "1-1=?", "response": 0}]).rows[0]["messages"][1]["content"] == "0"
    (row,) = pairs(tmp_path, [{"prompt": "1/2=?", "chosen": 0.5, "rejected": 2}]).rows
    assert [row[name][0]["content"] for name in ("chosen", "rejected")] == ["0.5", "2"]


def test_answers_within_a_prompt_are_context(tmp_path):
    (row,) = conversations(tmp_path, [{"prompt": [USER, BAD, USER], "completion": "2"}]).rows
    assert [message.get("weight", 1) for message in row["messages"]] == [1, 0, 1, 1]


def test_the_system_prompt_comes_first_unless_the_row_has_one(tmp_path):
    own = {"role": "system", "content": "own"}
    rows = [{"messages": [USER, GOOD]}, {"messages": [own, USER, GOOD]}]
    found = conversations(tmp_path, rows, system_prompt="given").rows
    assert [row["messages"][0]["content"] for row in found] == ["given", "own"]


def test_tools_are_kept(tmp_path):
    tool = {"type": "function", "function": {"name": "calculator"}}
    rows = [{"messages": [USER, GOOD], "tools": [tool]}, {"messages": [USER, BAD], "tools": None}]
    found = conversations(tmp_path, rows).rows
    assert found[0]["tools"] == [tool] and "tools" not in found[1]


def test_nested_parquet_columns_lose_the_nulls_that_parquet_adds(tmp_path):
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    pq.write_table(pa.table({"messages": [[USER, called, GOOD]]}), tmp_path / "train.parquet")
    (row,) = load_conversations(str(tmp_path), Columns()).rows
    assert row["messages"][0] == USER and row["messages"][1]["tool_calls"] == [{"id": "1"}]


def test_omitted_rows_are_counted_and_named(tmp_path):
    pair = {"prompt": "1+1=?", "chosen": "2", "rejected": "3"}
    found = pairs(tmp_path, [pair, pair, {**pair, "chosen": " "}, {**pair, "rejected": "2"}])
    report = found.report
    assert (len(found.rows), report.rows, sum(report.dropped.values())) == (1, 4, 3)
    assert report.dropped_rows["duplicate"] == ["train.jsonl:2"] and report.dropped_rows["empty"] == ["train.jsonl:3"]
    assert "1 duplicate (first: train.jsonl:2), 1 empty (first: train.jsonl:3), 1 undecided" in report.left_out()


def test_the_digest_is_of_content_and_order(tmp_path):
    one, two = {"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}
    digest = conversations(tmp_path, [one, two]).digest
    assert conversations(tmp_path, [{**one, "note": "not trained on"}, two]).digest == digest
    assert conversations(tmp_path, [two, one]).digest != digest


@pytest.mark.parametrize(
    ("load", "row", "columns", "said"),
    [
        (conversations, {"text": "x"}, {}, "its columns are 'text'; expected 'messages', or 'prompt' with 'response'"),
        (conversations, {"mesages": []}, {}, "did you mean 'mesages' for 'messages'"),
        (conversations, {"prompt": "x"}, {"prompt_type": "plaintext"}, "(prompt_type plaintext)"),
        (pairs, {"prompt": "x", "choosen": "y"}, {}, "'prompt', 'choosen'; expected 'prompt', 'chosen', 'rejected'"),
        (conversations, {"messages": [USER]}, {}, "train.jsonl:1, messages: no assistant message to learn from"),
        (conversations, {"messages": "hello"}, {}, "expected a list of messages, got the text 'hello'"),
        (
            conversations,
            {"messages": [USER, GOOD | {"weight": -0.5}]},
            {},
            "messages[1]: weight is -0.5; expected a number",
        ),
        (conversations, {"messages": [{"role": "bot", "content": "x"}]}, {}, "role 'bot'; expected one of system"),
        (conversations, {"messages": [USER, {"role": "assistant"}]}, {}, "nothing to learn"),
        (conversations, {"prompt": [USER, GOOD], "response": "x"}, {}, "prompt: ends with an assistant message"),
        (conversations, {"prompt": "x", "response": [USER]}, {}, "a role other than assistant"),
        (pairs, {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "y"}, BAD]}, {}, "start with the same"),
        (
            pairs,
            {"chosen": [USER, GOOD], "rejected": [USER, USER, BAD]},
            {},
            "train.jsonl:1, rejected: begins or ends with a role other than assistant",
        ),
        (
            pairs,
            {"chosen": [USER, GOOD, USER], "rejected": [USER, BAD]},
            {},
            "train.jsonl:1, chosen: begins or ends with a role other than assistant",
        ),
        (
            pairs,
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD, USER, BAD]},
            {},
            "train.jsonl:1: chosen and rejected differ before their last message",
        ),
        (conversations, {"prompt": " ", "response": "x"}, {}, "rows can be trained on: 1 empty (first: train.jsonl:1)"),
        (conversations, {"prompt": "x", "response": True}, {}, "expected text or a list of messages, got bool 'True'"),
    ],
)
def test_the_error_names_faults_of_rows(tmp_path, load, row, columns, said):
    with pytest.raises(UserError) as raised:
        load(tmp_path, [row], **columns)
    assert said in str(raised.value)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="the dataset is empty"):
        conversations(tmp_path, [])


def test_a_messages_weight_reaches_the_trainer(tmp_path: Path) -> None:
    rows = conversations(tmp_path, [{"prompt": [USER], "completion": [GOOD | {"weight": 0.5}]}]).rows
    assert [message.get("weight") for message in rows[0]["messages"]] == [None, 0.5]


@pytest.mark.parametrize(
    "row", [{"prompt": "1+1=?", "response": "\ud83d"}, {"messages": [USER, {**GOOD, "content": "\ud83d"}]}]
)
def test_half_a_surrogate_pair_is_named_by_its_line(tmp_path, row):
    with pytest.raises(UserError, match=r"train\.jsonl:2: holds '\\ud83d', half of a surrogate pair"):
        conversations(tmp_path, [{"messages": [USER, GOOD]} if "messages" in row else {**row, "response": "2"}, row])


@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "9" * 5000 + "]"], ids=["deep", "digits"])
def test_text_that_python_cannot_read_as_json_is_text_or_named_by_its_line(tmp_path, text):
    (row,) = conversations(tmp_path, [{"prompt": text, "response": "2"}]).rows
    assert row["messages"][0]["content"] == text
    with pytest.raises(UserError, match=r"train\.jsonl:1, messages: expected a list of messages, got the text"):
        conversations(tmp_path, [{"messages": text}])
    with pytest.raises(UserError, match=r"train\.jsonl:1, tools: not readable JSON"):
        conversations(tmp_path, [{"messages": [USER, GOOD], "tools": text}])
    with pytest.raises(UserError, match=r"expected 'messages', or 'data\.prompt'"):
        conversations(tmp_path, [{"data": text, "response": "2"}], prompt="data.prompt")
