"""The calls that are recorded: the caller's request, the engine's request, and the answer in the forms of both.

``EndpointCall`` is the interface; ``ChatCall`` is a call of ``/v1/chat/completions``, ``CompletionCall`` one of
``/v1/completions``, and ``ResponsesCall`` (``responses``) one of ``/v1/responses``. The classes do no I/O.

The engine returns token ids on request (``return_token_ids``): ``prompt_token_ids`` in a chat answer or in a choice of
a completion, ``choices[i].token_ids``, and log-probs in ``choices[i].logprobs``. The chunks of a streamed answer have
the same fields.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rft_platform.common.errors import EngineError, UserError
from rft_platform.openai_api import streams
from rft_platform.openai_api.messages import Message, prompts_of, with_defaults


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """Values of request fields that a call does not set."""

    model: str  # replaces the caller's model, so that an agent written for another model can use the policy
    sampling: Mapping[str, Any]  # the run's sampling parameters, by the names of their fields
    shown_model: str | None = None  # the model's name in answers; None: the engine's name

    def fill(self, body: dict[str, Any], **forced: Any) -> dict[str, Any]:
        """Return ``body`` with the run's sampling parameters in fields that ``body`` does not set, and with ``forced``.

        ``forced`` overrides fields of ``body``.
        """
        return {**with_defaults(body, self.sampling), "model": self.model, "return_token_ids": True, **forced}


@dataclass(frozen=True, slots=True)
class SampledChoice:
    """One choice of an answer, with the tokens that the engine sampled. ``token_ids`` and ``logprobs`` are as long."""

    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    message: Message  # the assistant's message


class EndpointCall(ABC):
    """One call of an endpoint."""

    engine_path: ClassVar[str]  # path of the engine's endpoint, below /v1
    sent: dict[str, Any]  # request body for the engine
    tools: list[dict[str, Any]]  # offered tools, in chat format

    def __init__(self, body: dict[str, Any], defaults: CallDefaults, *, wants_logprobs: bool, logprobs: Any) -> None:
        """``wants_logprobs``: the caller requested them; ``logprobs``: the field that makes the engine return them.

        Raises UserError if the call cannot be made.
        """
        self._wants_logprobs = wants_logprobs
        self._wants_token_ids = bool(body.get("return_token_ids"))
        self._shown_model = defaults.shown_model
        self.sent = defaults.fill(body, logprobs=logprobs)

    @property
    def choices(self) -> int:
        """Number of choices that the answer will have."""
        return int(self.sent.get("n") or 1)

    def msg_id(self, answer: dict[str, Any]) -> str:
        """The id of the answer, as the caller sees it."""
        return str(answer["id"])

    @abstractmethod
    def messages_of(self, choice: int) -> list[Message]:
        """The conversation that a choice answers, in chat format."""

    @abstractmethod
    def read(self, answer: dict[str, Any], choice: dict[str, Any]) -> tuple[Any, list[float], Message]:
        """(prompt ids or None, log-probs, assistant's message) of a choice of an answer."""

    @abstractmethod
    def begun(self) -> dict[str, Any]:
        """The fields of a choice before its first chunk, except index, token ids and finish reason."""

    @abstractmethod
    def merge(self, choice: dict[str, Any], piece: dict[str, Any]) -> None:
        """Add the text and the log-probs of ``piece``, a choice of a chunk."""

    def sampled(self, answer: dict[str, Any]) -> list[SampledChoice]:
        """The choices of an answer. Raises EngineError if ids or log-probs are missing or their numbers differ."""
        choices = []
        for choice in answer["choices"]:
            prompt_ids, logprobs, message = self.read(answer, choice)
            token_ids = choice.get("token_ids")
            if prompt_ids is None:
                raise EngineError(
                    f"answer {answer.get('id')}: no prompt_token_ids; the engine must honour return_token_ids"
                )
            if token_ids is None or len(token_ids) != len(logprobs):
                found = "no" if token_ids is None else len(token_ids)
                raise EngineError(f"answer {answer.get('id')}: {found} token ids and {len(logprobs)} log-probs")
            reason = choice.get("finish_reason") or "stop"
            choices.append(SampledChoice(choice["index"], prompt_ids, token_ids, logprobs, reason, message))
        return choices

    def restored(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, or a chunk of it, in the caller's form; ``None``: unchanged. May change ``answer`` in place.

        The fields for recording are removed if the caller did not request them, and the model's name is set.
        """
        if self._shown_model is not None:
            answer["model"] = self._shown_model
        elif self._wants_logprobs and self._wants_token_ids:
            return None
        choices = answer.get("choices") or []
        for part in () if self._wants_token_ids else (answer, *choices):
            part.pop("prompt_token_ids", None)
            part.pop("token_ids", None)
        for choice in () if self._wants_logprobs else choices:
            if "logprobs" in choice:
                choice["logprobs"] = None
        return answer

    def event(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        """The caller's event for one event of a streamed answer. May change ``chunk`` in place."""
        answer = self.restored(chunk)
        return event + streams.END if answer is None else streams.with_data(event, answer)

    def other_event(self, event: bytes) -> bytes:
        """The caller's event for an event without a chunk, such as ``[DONE]``."""
        return event + streams.END


class StreamedAnswer:
    """Joins the chunks of a streamed answer to the form of an answer that is not streamed."""

    def __init__(self, call: EndpointCall) -> None:
        self._call = call
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> bool:
        """Add one chunk in the engine's form; return True for the chunk that finishes the last choice."""
        self._fields.update({name: value for name, value in chunk.items() if name != "choices" and value is not None})
        finished = False
        for piece in chunk.get("choices") or []:
            choice = self._choices.get(piece["index"])
            if choice is None:
                choice = {"index": piece["index"], "token_ids": [], "finish_reason": None, **self._call.begun()}
                self._choices[piece["index"]] = choice
            choice["token_ids"] += piece.get("token_ids") or []
            self._call.merge(choice, piece)
            if piece.get("finish_reason") and choice["finish_reason"] is None:
                choice["finish_reason"] = piece["finish_reason"]
                finished = True
        found = self._choices.values()
        return finished and len(found) == self._call.choices and all(choice["finish_reason"] for choice in found)

    def whole(self) -> dict[str, Any]:
        """The answer up to the last chunk."""
        return {**self._fields, "choices": [self._choices[index] for index in sorted(self._choices)]}


class ChatCall(EndpointCall):
    """A chat completion."""

    engine_path: ClassVar[str] = "/chat/completions"

    def __init__(self, body: dict[str, Any], defaults: CallDefaults) -> None:
        super().__init__(body, defaults, wants_logprobs=bool(body.get("logprobs")), logprobs=True)
        shown = self.sent.get("tool_choice") != "none"  # with "none" the engine leaves tools out of the prompt
        self.tools = (self.sent.get("tools") or []) if shown else []

    def messages_of(self, choice: int) -> list[Message]:
        """The conversation, the same for all choices."""
        messages: list[Message] = self.sent.get("messages") or []
        return messages

    def read(self, answer: dict[str, Any], choice: dict[str, Any]) -> tuple[Any, list[float], Message]:
        """(prompt ids or None, log-probs, assistant's message); all choices have the same prompt."""
        logprobs = [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or []]
        return answer.get("prompt_token_ids"), logprobs, choice["message"]

    def begun(self) -> dict[str, Any]:
        """An empty message."""
        return {"message": {"role": "assistant", "content": None}, "logprobs": {"content": []}}

    def merge(self, choice: dict[str, Any], piece: dict[str, Any]) -> None:
        """Add the log-probs and the delta of ``piece``."""
        choice["logprobs"]["content"] += (piece.get("logprobs") or {}).get("content") or []
        message = choice["message"]
        for name, value in (piece.get("delta") or {}).items():
            if name == "tool_calls":
                for call in value or []:
                    _merge_tool_call(message.setdefault("tool_calls", []), call)
            elif isinstance(value, str) and name != "role":
                message[name] = (message.get(name) or "") + value
            elif value is not None:
                message[name] = value


def _merge_tool_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    while len(calls) <= piece["index"]:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[piece["index"]], piece.get("function") or {}
    call["id"] = piece.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


class CompletionCall(EndpointCall):
    """A completion of prompts (each a text or a list of token ids) that no chat template has rendered."""

    engine_path: ClassVar[str] = "/completions"

    def __init__(self, body: dict[str, Any], defaults: CallDefaults) -> None:
        wanted = body.get("logprobs")
        super().__init__(body, defaults, wants_logprobs=wanted is not None, logprobs=wanted or 0)
        prompt = body.get("prompt")
        if not isinstance(prompt, (str, list)) or prompt == []:
            raise UserError("prompt: expected a text, a list of token ids, or a list of these")
        self._prompts = prompts_of(prompt)
        self.tools = []

    @property
    def choices(self) -> int:
        """Number of choices: ``n`` for each prompt."""
        return len(self._prompts) * super().choices

    def messages_of(self, choice: int) -> list[Message]:
        """The prompt that ``choice`` answers, as messages; none for a prompt of token ids."""
        prompt = self._prompts[choice // super().choices]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []

    def read(self, answer: dict[str, Any], choice: dict[str, Any]) -> tuple[Any, list[float], Message]:
        """(prompt ids or None, log-probs, assistant's message); each choice has its own prompt."""
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return choice.get("prompt_token_ids"), logprobs, {"role": "assistant", "content": choice["text"]}

    def begun(self) -> dict[str, Any]:
        """An empty text."""
        return {"text": "", "prompt_token_ids": None, "logprobs": {"token_logprobs": []}}

    def merge(self, choice: dict[str, Any], piece: dict[str, Any]) -> None:
        """Add the text and the log-probs of ``piece``."""
        choice["text"] += piece.get("text") or ""
        choice["prompt_token_ids"] = choice["prompt_token_ids"] or piece.get("prompt_token_ids")
        choice["logprobs"]["token_logprobs"] += (piece.get("logprobs") or {}).get("token_logprobs") or []
