"""Limits of one OpenAI call: the number of its choices, and the tokens of its answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft_platform.openai_api.messages import prompts_of

_TOKEN_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_BYTES_A_TOKEN = 4  # rough size of a token in a request


class CallLimitError(ValueError):
    """A field of a call is above its limit, or is no integer."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The largest number of choices of a call, and of tokens of a choice."""

    most_choices: int
    most_tokens: int

    def apply(self, body: dict[str, Any], size: int) -> int:
        """Reduce the answer's length in ``body`` to the limit; return the tokens that the call may use, at most.

        ``size``: bytes of the request. Raises CallLimitError for too many choices.
        """
        prompts = len(prompts_of(body.get("prompt")))
        choices = prompts * (_integer(body, "n") or 1)
        if choices > self.most_choices:
            what = (
                f"{prompts} prompts with n={choices // prompts} are {choices} choices" if prompts > 1 else f"{choices}"
            )
            name = "n" if prompts == 1 else "prompt"
            raise CallLimitError(name, f"{what}; a request may have at most {self.most_choices} (service.most_choices)")
        given = {name: value for name in _TOKEN_FIELDS if (value := _integer(body, name)) is not None}
        body |= {name: min(value, self.most_tokens) for name, value in given.items()}
        longest = min(max(given.values(), default=self.most_tokens), self.most_tokens)
        return choices * max(0, longest) + size // _BYTES_A_TOKEN


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    """The integer of a field. Engines would also accept a text of digits, so other types are refused here."""
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise CallLimitError(name, f"{str(value)[:50]!r} is no integer")
