"""Personal data that the configured function removes is in no file and no database; its calls are not trained on."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.common.personal_data import Redaction
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.online.project import project_in
from rft_platform.online.service import redaction_of
from rft_platform.online.traffic.database import Call, open_database
from rft_platform.online.traffic.demonstrations import DemonstrationStore
from rft_platform.online.traffic.incoming import ENGINE, TEMPLATE_HASH, NewCall, NewFeedback
from rft_platform.online.traffic.preferences import PreferenceStore
from rft_platform.online.traffic.project_traffic import traffic_database, traffic_store
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.online.traffic.writer import TrafficWriter
from rft_platform.rounds.explore import collect
from rft_platform.rounds.judge import judge
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish
from tests.online.test_forget import files_with

SECRET = "ann@quillfeather.example"
CODE = r"""
import re

def redact(text):
    return re.sub(r"[\w.+-]+@[\w-]+\.[\w.]+", "[email]", text)
"""


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Project:
    (tmp_path / "privacy.py").write_text(CODE)
    config = build_config(
        {
            "model": {"model_path": str(tiny_model), "max_model_len": 64},
            "algorithm": {"algorithm_type": "reinforce++"},
            "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
            "service": {"redaction": f"{tmp_path / 'privacy.py'}:redact"},
        }
    )
    project = project_in(Home(tmp_path / "home"), config)
    publish(project.store, Policy("model", 0, "0" * 64, round=0))
    return project


def call(msg_id: str, question: str, arguments: str = "{}") -> NewCall:
    recorded: dict[str, Any] = {
        "msg_id": msg_id, "prompt_ids": [1, 2], "response_ids": [3], "rollout_logprobs": [-0.5],
        "finish_reason": "stop", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "tools": [], "policy_version": 0,
        "messages": [{"role": "user", "content": [{"type": "text", "text": question}]}],
        "response": {
            "role": "assistant", "content": "done",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "send", "arguments": arguments}}],
        },
        ENGINE: "transformers", TEMPLATE_HASH: "t",
    }  # fmt: skip
    return NewCall(msg_id, 0, recorded, 0, 3, time.time())


def test_the_text_is_in_no_file_and_its_call_is_kept_for_statistics_only(project: Project) -> None:
    redaction = redaction_of(project)
    traffic = traffic_store(project, redaction)
    arguments = json.dumps({"to": SECRET})
    traffic.record([call("a", f"Write to {SECRET}"), call("b", "Hello"), call("c", "Send it", arguments)])
    for msg_id in "abc":
        body = {"comment": f"{SECRET} says", "tags": {"from": [SECRET]}, "user_feedback": {"comment": SECRET}}
        traffic.give_feedback(
            NewFeedback(
                f"f{msg_id}", [msg_id], 1.0, comment=body["comment"], correction=f"Dear {SECRET}", tags=body["tags"],
                request=body,
            )
        )  # fmt: skip
    assert traffic.commit().committed == 1
    collect(project, 1)
    judge(project, 1)
    assert [row.call.msg_id for row in project.store.rollout_rows(1)] == ["b"]
    assert files_with(project.home.root, SECRET) == []
    assert files_with(project.home.root, "[email]")
    assert redaction.calls == 2
    stored = {each.msg_id: each for each in traffic.calls(["a", "b", "c"])}
    assert {name: (each.state, each.reward) for name, each in stored.items()} == {
        "a": ("untrainable", 1.0), "b": ("consumed", 1.0), "c": ("untrainable", 1.0),
    }  # fmt: skip
    assert stored["a"].model_call["messages"][0]["content"][0] == {"type": "text", "text": "Write to [email]"}
    assert stored["a"].model_call["prompt_ids"] == stored["a"].model_call["response_ids"] == []
    sent = stored["c"].model_call["response"]["tool_calls"][0]["function"]
    assert sent == {"name": "send", "arguments": '{"to": "[email]"}'}
    assert stored["b"].model_call["response_ids"] == [3]
    corrections = [row["messages"][-1]["content"] for row in DemonstrationStore(traffic_database(project)).rows()]
    assert corrections == ["Dear [email]"] * 3


def test_a_prompt_of_token_ids_is_stored_without_tokens_if_there_is_a_function(project: Project) -> None:
    completion = call("a", "")
    completion.model_call["messages"] = []
    redaction = redaction_of(project)
    traffic_store(project, redaction).record([completion])
    traffic_store(project).record([replace(completion, msg_id="b")])
    found = traffic_store(project).calls(["a", "b"])
    stored = {each.msg_id: (each.state, each.model_call["prompt_ids"]) for each in found}
    assert stored == {"a": ("untrainable", []), "b": ("recorded", [1, 2])}
    assert redaction.calls == 1


def test_tags_and_tools_are_redacted_and_the_structure_stays() -> None:
    redaction = Redaction(lambda text: text.replace(SECRET, "[email]").replace("send", "[verb]"))
    assert redaction.value({"id": SECRET, "role": [SECRET]}) == {"id": "[email]", "role": ["[email]"]}
    name = {"type": "string", "description": f"or {SECRET}", "enum": [SECRET]}
    function = {"name": "send", "parameters": {"type": "object", "properties": {"name": name}, "required": ["send"]}}
    recorded = {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": function}],
        "prompt_ids": [1, 2],
    }
    changed = redaction.model_call(recorded)
    assert changed is not None
    assert (changed["prompt_ids"], changed["messages"]) == ([], recorded["messages"])
    found = changed["tools"][0]["function"]
    assert found["parameters"]["properties"]["name"] == {
        "type": "string", "description": "or [email]", "enum": ["[email]"],
    }  # fmt: skip
    assert (found["name"], found["parameters"]["required"]) == ("send", ["send"])


def test_the_action_is_that_of_the_call_before_its_redaction(project: Project) -> None:
    question = call("a", "Hello")
    question.model_call["response"] = {"role": "assistant", "content": "Which order?"}
    traffic = TrafficStore(traffic_database(project), redaction=Redaction(lambda text: "[removed]"))
    traffic.record([question])
    assert [(each.state, each.action) for each in traffic.calls(["a"])] == [("untrainable", "question")]


def test_a_text_with_nul_is_stored_without_it_and_not_trained_on(database_url: str) -> None:
    traffic = TrafficStore(engine := open_database(database_url))
    traffic.record([call("a", "Hello\0"), call("b", "Hello", '{"x": "\0"}'), call("c", r"the text \u0000")])
    stored = {each.msg_id: each for each in traffic.calls(["a", "b", "c"])}
    assert [each.state for each in stored.values()] == ["untrainable", "untrainable", "recorded"]
    assert stored["a"].model_call["messages"][0]["content"][0]["text"] == "Hello\ufffd"
    assert stored["b"].model_call["response"]["tool_calls"][0]["function"]["arguments"] == '{"x": "\ufffd"}'
    assert [each.model_call["prompt_ids"] for each in stored.values()] == [[], [], [1, 2]]
    with Session(engine) as session:
        reasons = session.scalars(select(Call.model_call["finish_reason"].as_string())).all()
    assert reasons == ["stop"] * 3, "PostgreSQL can read each row"


def test_comments_of_preferences_are_redacted(project: Project) -> None:
    traffic_store(project).record([call("a", "Hello"), call("b", "Hello", '{"x": 1}')])
    database = traffic_database(project)
    preferences = PreferenceStore(database, redaction=redaction_of(project))
    pair = preferences.next_pair()
    assert pair is not None
    preferences.pick(pair.left, pair.right, "left", f"{SECRET} prefers it")
    with database.connect() as connection:
        assert connection.exec_driver_sql("SELECT comment FROM preferences").scalar() == "[email] prefers it"


def fails(text: str) -> str:
    raise ValueError(f"cannot read {text}")


@pytest.mark.parametrize("function", [fails, lambda text: None])
def test_what_cannot_be_redacted_is_not_stored_and_not_shown(project: Project, caplog, function) -> None:
    traffic = TrafficStore(traffic_database(project), redaction=Redaction(function))
    writer = TrafficWriter(traffic)
    writer.record(call("a", SECRET))
    writer.close()
    assert (writer.counts.dropped, traffic.counts()["recorded"]) == (1, 0)
    traffic_store(project).record([call("b", "Hello")])
    with pytest.raises(UserCodeError, match=re.escape("service.redaction")) as error:
        traffic.give_feedback(NewFeedback("f", ["b"], 1.0, comment=SECRET))
    assert SECRET not in str(error.value)
    assert error.value.__context__ is None or error.value.__suppress_context__
    assert SECRET not in caplog.text and "service.redaction" in caplog.text


def test_the_error_names_a_missing_function(project: Project) -> None:
    service = project.config.service.model_copy(update={"redaction": "privacy_of_nobody:redact"})
    other = project_in(project.home, project.config.model_copy(update={"service": service}))
    with pytest.raises(UserError, match=r"service\.redaction 'privacy_of_nobody:redact': cannot import"):
        redaction_of(other)
