"""Responses of workflows as JSON and back."""

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from rft_platform.experience.responses import decode_response, encode_response


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


@pytest.mark.parametrize("value", [None, "text", 3, 0.5, True, [1, "a", None], {"content": "x", "n": [1]}])
def test_json_values_stay_what_they_are(value: Any) -> None:
    assert encode_response(value) == value
    assert decode_response(encode_response(value)) == value


def test_objects_come_back_as_their_class() -> None:
    assert decode_response(encode_response(Answer("4", 0.5))) == Answer("4", 0.5)
    assert decode_response(encode_response(Message(content="4"))) == Message(content="4")
    restored = decode_response(encode_response(Legacy("4")))
    assert isinstance(restored, Legacy) and restored.content == "4"


def test_a_class_that_is_not_there_leaves_its_content() -> None:
    assert decode_response({"$class": "no_such_package:Msg", "value": {"content": "4"}}) == {"content": "4"}


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(TypeError, match=r"object\) cannot be stored"):
        encode_response(object())
    with pytest.raises(TypeError, match="cannot be stored"):
        encode_response({"x": float("nan")})
