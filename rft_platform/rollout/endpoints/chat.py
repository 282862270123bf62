"""The endpoint ``/v1/chat/completions``.

The engine returns token ids on request (``return_token_ids``) as ``prompt_token_ids`` and ``choices[i].token_ids``, and
log-probs as ``choices[i].logprobs.content[j].logprob``. The chunks of a streamed answer carry the same fields.
"""

from typing import Any, ClassVar

from rft_platform.experience.record import ModelCall
from rft_platform.rollout.endpoints.endpoint import CallDefaults, Endpoint, StreamedAnswer


class ChatCall(Endpoint):
    """A chat completion."""

    engine_path: ClassVar[str] = "/chat/completions"

    def __init__(self, body: dict[str, Any], defaults: CallDefaults) -> None:
        self._logprobs = bool(body.get("logprobs"))  # the caller gets the fields for recording only if requested
        self._token_ids = bool(body.get("return_token_ids"))
        self._shown_model = defaults.shown_model
        self.sent = defaults.fill(body, logprobs=True)
        shown = self.sent.get("tool_choice") != "none"  # with "none" the engine leaves tools out of the prompt
        self.tools = (self.sent.get("tools") or []) if shown else []

    def messages_of(self, choice: int) -> list[dict[str, Any]]:
        """The conversation, the same for all choices."""
        messages: list[dict[str, Any]] = self.sent.get("messages") or []
        return messages

    def sampled(self, answer: dict[str, Any]) -> list[ModelCall]:
        """The choices as model calls, all with the same prompt ids."""
        choices = []
        for choice in answer["choices"]:
            logprobs = [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or []]
            prompt_ids = answer.get("prompt_token_ids")
            choices.append(self.sampled_call(answer, choice, prompt_ids, logprobs, choice["message"]))
        return choices

    def restored(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """Remove token ids and log-probs that the caller did not request, and set the model's name."""
        if self._shown_model is not None:
            answer["model"] = self._shown_model
        elif self._logprobs and self._token_ids:
            return None
        if not self._token_ids:
            answer.pop("prompt_token_ids", None)
        for choice in answer.get("choices") or []:
            if not self._token_ids:
                choice.pop("token_ids", None)
            if not self._logprobs and "logprobs" in choice:
                choice["logprobs"] = None
        return answer

    def assembled(self) -> StreamedAnswer:
        """Return a collector that joins the deltas."""
        return _StreamedChat(self.choices)


class _StreamedChat(StreamedAnswer):
    """Joins the deltas of a streamed chat answer."""

    def empty(self) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": None}, "logprobs": {"content": []}}

    def merge(self, choice: dict[str, Any], piece: dict[str, Any]) -> None:
        choice["logprobs"]["content"] += (piece.get("logprobs") or {}).get("content") or []
        _merge_message(choice["message"], piece.get("delta") or {})


def _merge_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if value is None:
            continue
        if name == "tool_calls":
            for piece in value:
                _merge_tool_call(message.setdefault("tool_calls", []), piece)
        elif name == "role" or not isinstance(value, str):
            message[name] = value
        else:
            message[name] = (message.get(name) or "") + value


def _merge_tool_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    while len(calls) <= piece["index"]:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[piece["index"]], piece.get("function") or {}
    call["id"] = piece.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
