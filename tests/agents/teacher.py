"""A teacher for every framework: an engine of scripted answers, and what agents asked of it as demonstrations."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from rft_platform.experience.record import RolloutRow
from tests.rollout.fake_engine import FakeEngine

QUESTION, EXPRESSION, ANSWER = "What is 12*7?", "12*7", "84"


class Teacher(FakeEngine):
    """Calls ``calculator`` first; with a result in sight it answers, by the tool for answers where it may."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ANSWER  # so that a streamed answer has this text, too

    def _chat_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._chat_answer(body)
        for index, choice in enumerate(answer["choices"]):
            number = f"{len(self.chat_requests)}/{index}"
            choice["message"] = _message(body, f"call_{hashlib.sha256(number.encode()).hexdigest()[:24]}")
            choice["finish_reason"] = "tool_calls" if choice["message"].get("tool_calls") else "stop"
        return {**answer, "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}


#: Tools that frameworks add for the answer, and what the teacher gives them.
ANSWER_TOOLS: dict[str, dict[str, Any]] = {
    "final_answer": {"answer": ANSWER},
    "generate_response": {"value": int(ANSWER)},
}


def _message(body: dict[str, Any], call_id: str) -> dict[str, Any]:
    if not any(_is_result(message) for message in body["messages"]):
        return _calls("calculator", {"expression": EXPRESSION}, call_id)
    names = {tool["function"]["name"] for tool in body.get("tools") or []} & ANSWER_TOOLS.keys()
    if names and body.get("tool_choice") != "none":
        (name,) = names
        return _calls(name, ANSWER_TOOLS[name], call_id)
    return {"role": "assistant", "content": ANSWER}


def _is_result(message: dict[str, Any]) -> bool:
    """Whether a tool has spoken; smolagents makes a message of the user of it."""
    return message["role"] == "tool" or "Observation" in str(message.get("content"))


def _calls(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def demonstrations(rows: Iterable[RolloutRow]) -> list[dict[str, Any]]:
    """Each call as a conversation whose last message is imitated."""
    return [
        {
            "messages": [
                *({**message, "weight": 0} if message["role"] == "assistant" else message for message in row.messages),
                row.response,
            ],
            "tools": row.tools or None,
        }
        for row in rows
    ]
