"""Redaction of personal data by a user function, before anything is stored; ``redaction`` masks secrets.

The token ids of a call decode to its text. If the function changes a text of the call, the tokens are removed as well,
and the call cannot be trained on. The same holds for a prompt of token ids, whose text the function does not see.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rft_platform.common.errors import UserCodeError

TEXTS = ("messages", "response", "tools")  #: parts of a recorded call that hold text
TOKENS = ("prompt_ids", "response_ids", "rollout_logprobs")  #: parts that hold tokens
_NO_TEXT = frozenset({"role", "type", "id", "tool_call_id"})  # keys of messages whose values are not redacted
_NO_TEXT_OF_TOOLS = frozenset({"type", "name", "required", "$ref"})  # the same for tools
_DATA = frozenset({"arguments", "default", "enum", "const", "examples"})  # below these keys every text is redacted
_NOTHING = frozenset[str]()


class Redaction:
    """Applies a function from text to text. An error of the function never shows the text."""

    def __init__(self, function: Callable[[str], Any] | None = None, setting: str = "service.redaction") -> None:
        """Without a ``function`` nothing changes. Errors name the ``setting`` that names the function."""
        self.calls = 0  # recorded calls that were changed, since the start
        self._function = function
        self._setting = setting

    def text(self, text: str | None) -> str | None:
        """``text`` as it may be stored: redacted by the user's function if there is one.

        Raises UserCodeError if the function fails.
        """
        if self._function is None or not text:
            return text
        try:
            found = self._function(text)
        except Exception as error:
            # neither the message nor the cause: both may quote the text
            raise UserCodeError(f"{self._setting} raised {type(error).__name__}") from None
        if not isinstance(found, str):
            raise UserCodeError(f"{self._setting} returned {type(found).__name__}: expected text")
        return found

    def value(self, value: Any, kept: frozenset[str] = _NOTHING) -> Any:
        """A JSON value with every text redacted, except key names and the texts below the keys ``kept``."""
        if self._function is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(each, kept) for each in value]
        if isinstance(value, Mapping):
            return {
                name: each
                if name in kept and not isinstance(each, Mapping)
                else self.value(each, _NOTHING if name in _DATA else kept)
                for name, each in value.items()
            }
        return value

    def model_call(self, call: Mapping[str, Any]) -> dict[str, Any] | None:
        """A recorded call with redacted texts and without its tokens; None if it may be stored as it is."""
        if self._function is None:
            return None
        before = {name: call[name] for name in TEXTS if name in call}
        kept = {"tools": _NO_TEXT_OF_TOOLS}
        after = {name: self.value(each, kept.get(name, _NO_TEXT)) for name, each in before.items()}
        unseen = bool(call.get("prompt_ids")) and not call.get("messages")  # a prompt of token ids
        if after == before and not unseen:
            return None
        self.calls += 1
        return {**call, **after, **{name: [] for name in TOKENS if name in call}}
