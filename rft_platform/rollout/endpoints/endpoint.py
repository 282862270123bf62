"""The interface between the recorder and an endpoint."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from rft_platform.common.errors import EngineError
from rft_platform.experience.record import ModelCall
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.endpoints import events


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """Values of request fields that a call does not set."""

    model: str  # replaces the caller's model, so that an agent written for another model can use the policy
    sampling: SamplingParams
    seed: int
    shown_model: str | None = None  # the model's name in answers; None: the engine's name

    def fill(self, body: dict[str, Any], **forced: Any) -> dict[str, Any]:
        """Return ``body`` with the run's sampling parameters in fields that ``body`` does not set, and with ``forced``.

        ``forced`` overrides fields of ``body``.
        """
        sampling = self.sampling
        defaults: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": self.seed}
        if sampling.top_k > 0:
            defaults["top_k"] = sampling.top_k
        if sampling.stop:
            defaults["stop"] = list(sampling.stop)
        if body.get("max_completion_tokens") is None:
            defaults["max_tokens"] = sampling.max_tokens
        fields = {name: value for name, value in body.items() if value is not None}
        return {**defaults, **fields, "model": self.model, "return_token_ids": True, **forced}


class StreamedAnswer(ABC):
    """Joins the chunks of a streamed answer of ``n`` choices."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> bool:
        """Add one chunk in the engine's form; return True for the chunk that finishes the last choice."""
        self._fields.update({name: value for name, value in chunk.items() if name != "choices" and value is not None})
        finished = False
        for piece in chunk.get("choices") or []:
            choice = self._choices.get(piece["index"])
            if choice is None:
                choice = {"index": piece["index"], "token_ids": [], "finish_reason": None, **self.empty()}
                self._choices[piece["index"]] = choice
            choice["token_ids"] += piece.get("token_ids") or []
            self.merge(choice, piece)
            if piece.get("finish_reason") and choice["finish_reason"] is None:
                choice["finish_reason"] = piece["finish_reason"]
                finished = True
        return finished and len(self._choices) == self._n and all(c["finish_reason"] for c in self._choices.values())

    def whole(self) -> dict[str, Any]:
        """The answer up to the last chunk, in the form of an answer that is not streamed."""
        return {**self._fields, "choices": [self._choices[index] for index in sorted(self._choices)]}

    @abstractmethod
    def empty(self) -> dict[str, Any]:
        """Initial fields of a choice, except index, token ids and finish reason."""

    @abstractmethod
    def merge(self, choice: dict[str, Any], piece: dict[str, Any]) -> None:
        """Add the text and the log-probs of ``piece``."""


class Endpoint(ABC):
    """One call: the caller's request, the engine's request, and the answer in the forms of engine and caller."""

    engine_path: ClassVar[str]  # path of the engine's endpoint, below /v1
    sent: dict[str, Any]  # request body for the engine
    tools: list[dict[str, Any]]  # offered tools, in chat format

    @abstractmethod
    def __init__(self, body: dict[str, Any], defaults: CallDefaults) -> None:
        """Raises UserError if the call cannot be made."""

    @property
    def choices(self) -> int:
        """Number of choices that the answer will have."""
        return int(self.sent.get("n") or 1)

    def msg_id(self, answer: dict[str, Any]) -> str:
        """The id of the answer, as the caller sees it."""
        return str(answer["id"])

    @abstractmethod
    def messages_of(self, choice: int) -> list[dict[str, Any]]:
        """The conversation that a choice answers, in chat format."""

    @abstractmethod
    def sampled(self, answer: dict[str, Any]) -> list[ModelCall]:
        """The choices of an answer as model calls, without the fields that the recorder sets: version, time, position.

        Raises EngineError if ids or log-probs are missing or their numbers differ.
        """

    def sampled_call(
        self, answer: dict[str, Any], choice: dict[str, Any], prompt_ids: Any, logprobs: list[float], response: Any
    ) -> ModelCall:
        """Build the call of one choice. ``logprobs`` and ``response`` come from the answer, in the store's form."""
        if prompt_ids is None:
            raise EngineError(
                f"answer {answer.get('id')}: no prompt_token_ids; the engine must honour return_token_ids"
            )
        token_ids = choice.get("token_ids")
        if token_ids is None or len(token_ids) != len(logprobs):
            found = "no" if token_ids is None else len(token_ids)
            raise EngineError(f"answer {answer.get('id')}: {found} token ids and {len(logprobs)} log-probs")
        return ModelCall(
            msg_id=self.msg_id(answer),
            prompt_ids=prompt_ids,
            response_ids=token_ids,
            rollout_logprobs=logprobs,
            finish_reason=choice.get("finish_reason") or "stop",
            temperature=float(self.sent["temperature"]),
            top_p=float(self.sent["top_p"]),
            top_k=int(self.sent.get("top_k") or -1),
            messages=self.messages_of(choice["index"]),
            tools=self.tools,
            response=response,
            choice=choice["index"],
            constrained=bool(answer.get("constrained")),
        )

    @abstractmethod
    def restored(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """The whole answer in the caller's form; ``None``: unchanged. May change ``answer`` in place."""

    @abstractmethod
    def assembled(self) -> StreamedAnswer:
        """Return a collector for the chunks of a streamed answer."""

    def event(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        """The caller's event for one event of a streamed answer. May change ``chunk`` in place."""
        answer = self.restored(chunk)
        return event + events.END if answer is None else events.with_data(event, answer)

    def other_event(self, event: bytes) -> bytes:
        """The caller's event for an event without a chunk, such as ``[DONE]``."""
        return event + events.END
