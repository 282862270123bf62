"""Responses of workflows as JSON and back; stored documents are data and never run code."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, field_validator

from rft_platform.experience.responses import ResponseDecoder, encode_response

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$class", "value", "a"]) | st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)

RAN: list[str] = []  # code that ran though nothing declares it


@dataclass
class Answer:
    text: str
    score: float


class Message(BaseModel):
    content: str


class Legacy:
    """As AgentScope's Msg: to_dict and from_dict."""

    def __init__(self, content: str) -> None:
        self.content = content

    def to_dict(self) -> dict[str, Any]:
        return {"content": self.content}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Legacy":
        return cls(data["content"])


class Init:
    def __init__(self, **given: Any) -> None:
        RAN.append("__init__")


@dataclass
class PostInit:
    text: str = ""

    def __post_init__(self) -> None:
        RAN.append("__post_init__")


class Validating(BaseModel):
    text: str = ""

    @field_validator("text")
    @classmethod
    def check(cls, value: str) -> str:
        RAN.append("validator")
        return value


class FromDict:
    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "FromDict":
        RAN.append("from_dict")
        return cls()


def function(**given: Any) -> None:
    RAN.append("function")


def restored(value: Any, *classes: type) -> Any:
    return ResponseDecoder(classes).decode(encode_response(value))


@pytest.mark.parametrize("value", [None, "text", 3, 0.5, True, [1, "a", None], {"content": "x", "n": [1]}])
def test_json_values_stay_what_they_are(value: Any) -> None:
    assert encode_response(value) == value
    assert restored(value) == value


@given(JSON)
def test_every_json_value_round_trips(value: Any) -> None:
    decoder = ResponseDecoder([Answer, Message])
    assert decoder.decode(encode_response(value)) == value
    assert decoder.left_plain == {}, "a JSON value is never taken for an object"


def test_objects_are_passed_as_the_declared_class() -> None:
    assert restored(Answer("4", 0.5), Answer) == Answer("4", 0.5)
    assert restored(Message(content="4"), Answer, Message) == Message(content="4")
    back = restored(Legacy("4"), Legacy)
    assert isinstance(back, Legacy) and back.content == "4"


def test_objects_of_other_classes_are_passed_as_their_content() -> None:
    decoder = ResponseDecoder([Message])
    assert decoder.decode(encode_response(Answer("4", 0.5))) == {"text": "4", "score": 0.5}
    assert decoder.left_plain == {f"{__name__}:Answer": "the judge does not declare this class"}


def test_a_content_that_does_not_fit_the_class_is_passed_as_plain_values() -> None:
    decoder = ResponseDecoder([Message])
    assert decoder.decode({"$class": f"{__name__}:Message", "value": {"content": [1]}}) == {"content": [1]}
    assert "ValidationError" in decoder.left_plain[f"{__name__}:Message"]


@pytest.mark.parametrize("kind", [Init, PostInit, Validating, FromDict, function])
@pytest.mark.parametrize("shape", ["marker", "escaped", "in a list", "in a dictionary", "in a declared object"])
def test_a_stored_document_never_runs_what_it_names(kind: Any, shape: str) -> None:
    content: dict[str, Any] = {"text": "x"}
    marker: dict[str, Any] = {"$class": f"{__name__}:{kind.__name__}", "value": content}
    documents = {
        "marker": (marker, content),
        "escaped": ({"$class": None, "value": marker}, marker),
        "in a list": ([marker], [marker]),
        "in a dictionary": ({"answer": marker}, {"answer": marker}),
        "in a declared object": (
            {"$class": f"{__name__}:Answer", "value": {"text": marker, "score": 1.0}},
            Answer(marker, 1.0),  # type: ignore[arg-type]
        ),
    }
    document, expected = documents[shape]
    RAN.clear()
    assert ResponseDecoder([Answer, Message]).decode(document) == expected
    assert RAN == []


def test_a_stored_document_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    for name in ("planted:Msg", "planted:Answer", "planted.x:y", "subprocess:Popen", "agentscope.planted:Msg", ":", ""):
        assert ResponseDecoder([Answer]).decode({"$class": name, "value": {"args": "id"}}) == {"args": "id"}
    assert "planted" not in sys.modules


@pytest.mark.parametrize("name", [1, True, ["os:system"], {"a": 1}, 0.5])
def test_a_marker_that_the_platform_does_not_write_is_a_plain_value(name: Any) -> None:
    document = {"$class": name, "value": {}}
    assert ResponseDecoder([Answer]).decode(document) == document


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(TypeError, match=r"object\) cannot be stored"):
        encode_response(object())
    with pytest.raises(TypeError, match="cannot be stored"):
        encode_response({"x": float("nan")})
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TypeError, match="cannot be stored"):
        encode_response(deep)
