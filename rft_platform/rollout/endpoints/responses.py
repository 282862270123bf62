"""The endpoint ``/v1/responses``: the request becomes a chat call to the engine, the chat answer becomes a response.

Neither engine returns token ids on its own responses endpoint, so the platform uses the chat endpoint of both engines.
Responses are not stored: a request that needs an earlier response (``previous_response_id``, item references) is
refused.
"""

from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.rollout.endpoints.chat import ChatCall
from rft_platform.rollout.endpoints.endpoint import CallDefaults
from rft_platform.rollout.endpoints.responses_answer import response_id, response_of
from rft_platform.rollout.endpoints.responses_events import ResponseEvents
from rft_platform.rollout.endpoints.responses_input import chat_messages

#: Request fields that are translated, or that have no meaning here: no stored responses, hosted tools or accounts.
_CONSUMED = {
    "input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "reasoning", "include", "store",
    "stream", "stream_options", "metadata", "truncation", "top_logprobs", "user", "safety_identifier", "service_tier",
    "prompt_cache_key", "prompt_cache_retention", "max_tool_calls", "previous_response_id", "conversation",
    "background", "prompt", "context_management",
}  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"


class ResponsesCall(ChatCall):
    """A response, sampled as a chat completion."""

    def __init__(self, body: dict[str, Any], defaults: CallDefaults) -> None:
        _refuse_what_needs_a_store(body)
        self._body = body
        super().__init__(_chat_body(body), defaults)
        self._events = ResponseEvents(body, defaults.shown_model or self.sent["model"])

    def msg_id(self, answer: dict[str, Any]) -> str:
        """The response's id."""
        return response_id(answer)

    def restored(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the response."""
        super().restored(answer)
        return response_of(self._body, answer)

    def event(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        """Return the events for one chunk of the chat answer."""
        super().restored(chunk)
        return self._events.of_chunk(chunk)

    def other_event(self, event: bytes) -> bytes:
        """Return the last events instead of ``[DONE]``."""
        return self._events.finish() if b"[DONE]" in event else b""


def _refuse_what_needs_a_store(body: dict[str, Any]) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise UserError(f"{name}: no response is stored here; send the whole conversation as `input` items instead")
    if body.get("background"):
        raise UserError("background: responses are only answered synchronously; leave it out")
    if body.get("truncation") not in (None, "disabled"):
        raise UserError(f"truncation {body['truncation']!r}: only 'disabled' is supported; shorten the input yourself")
    if (body.get("n") or 1) != 1:
        raise UserError("n: a response has one answer; send several requests, or use chat completions")


def _chat_body(body: dict[str, Any]) -> dict[str, Any]:
    chat = {name: value for name, value in body.items() if name not in _CONSUMED and value is not None}
    chat["messages"] = chat_messages(body.get("input"), body.get("instructions"))
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        chat["tools"] = [_chat_tool(tool) for tool in body["tools"]]
        if body.get("tool_choice") is not None:
            chat["tool_choice"] = _chat_tool_choice(body["tool_choice"])
    if (body.get("reasoning") or {}).get("effort") is not None:
        chat["reasoning_effort"] = body["reasoning"]["effort"]
    if (form := (body.get("text") or {}).get("format")) is not None and form.get("type") != "text":
        chat["response_format"] = _response_format(form)
    if _LOGPROBS in (body.get("include") or []) or body.get("top_logprobs"):
        chat["logprobs"], chat["top_logprobs"] = True, body.get("top_logprobs") or 0
    if body.get("stream"):
        chat["stream"], chat["stream_options"] = True, {"include_usage": True}
    return chat


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or "name" not in tool:
        raise UserError(f"tools: {tool.get('type')!r} is a tool that OpenAI hosts; only functions with a name run here")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _chat_tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise UserError(f"tool_choice {choice!r}: expected 'auto', 'none', 'required' or a function")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    names = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in names if form.get(name) is not None}}
