"""The endpoint ``/v1/completions``: one or more prompts, each a text or a list of token ids; one row per choice.

The engine returns ids as ``choices[i].prompt_token_ids`` and ``choices[i].token_ids``, log-probs as
``choices[i].logprobs.token_logprobs``.
"""

from typing import Any, ClassVar

from rft_platform.common.errors import UserError
from rft_platform.experience.record import ModelCall
from rft_platform.rollout.endpoints.endpoint import CallDefaults, Endpoint, StreamedAnswer

_FIELDS = ("token_ids", "prompt_token_ids")


class CompletionCall(Endpoint):
    """A completion of prompts that no chat template has rendered."""

    engine_path: ClassVar[str] = "/completions"

    def __init__(self, body: dict[str, Any], defaults: CallDefaults) -> None:
        self._logprobs = body.get("logprobs") is not None
        self._token_ids = bool(body.get("return_token_ids"))
        self._shown_model = defaults.shown_model
        self.sent = defaults.fill(body, logprobs=body.get("logprobs") or 0)
        self._prompts = _prompts(body.get("prompt"))
        self.tools = []

    def messages_of(self, choice: int) -> list[dict[str, Any]]:
        """The prompt that ``choice`` answers, as messages; none for a prompt of token ids (see ``prompt_ids``)."""
        prompt = self._prompts[choice // super().choices]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []

    @property
    def choices(self) -> int:
        """Number of choices: ``n`` for each prompt."""
        return len(self._prompts) * super().choices

    def sampled(self, answer: dict[str, Any]) -> list[ModelCall]:
        """The choices as model calls, each with the token ids of its prompt."""
        found = []
        for choice in answer["choices"]:
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
            message = {"role": "assistant", "content": choice["text"]}
            found.append(self.sampled_call(answer, choice, choice.get("prompt_token_ids"), logprobs, message))
        return found

    def restored(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """Remove token ids and log-probs that the caller did not request, and set the model's name."""
        if self._shown_model is not None:
            answer["model"] = self._shown_model
        elif self._logprobs and self._token_ids:
            return None
        for choice in answer.get("choices") or []:
            for name in () if self._token_ids else _FIELDS:
                choice.pop(name, None)
            if not self._logprobs and "logprobs" in choice:
                choice["logprobs"] = None
        return answer

    def assembled(self) -> StreamedAnswer:
        """Return a collector that joins the texts."""
        return _StreamedCompletion(self.choices)


class _StreamedCompletion(StreamedAnswer):
    """Joins the texts of a streamed completion."""

    def empty(self) -> dict[str, Any]:
        return {"text": "", "prompt_token_ids": None, "logprobs": {"token_logprobs": []}}

    def merge(self, choice: dict[str, Any], piece: dict[str, Any]) -> None:
        choice["text"] += piece.get("text") or ""
        choice["prompt_token_ids"] = choice["prompt_token_ids"] or piece.get("prompt_token_ids")
        choice["logprobs"]["token_logprobs"] += (piece.get("logprobs") or {}).get("token_logprobs") or []


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise UserError("prompt: expected a text, a list of token ids, or a list of these")
    return [prompt] if isinstance(prompt[0], int) else prompt
