"""One type for a trace of any tracing tool: the conversation before the answer, the answer, and what is known of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_platform.tasks.messages import Message, conversation


class BadTraceError(Exception):
    """A trace that cannot be imported; the text says why. It is reported, and the others are imported."""


@dataclass(frozen=True, slots=True)
class BadTrace:
    """What the report says about a trace that was skipped."""

    trace_id: str  # or the file and line, if the record has no readable id
    reason: str


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of a language model in a trace."""

    started_at: float  # seconds since 1970
    messages: list[Message]
    answer: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Trace:
    """A run of somebody's agent, as a tracing tool recorded it. It has no token ids: it is never an on-policy row."""

    trace_id: str
    link: str | None
    prompt: list[Message]  # up to the message that the model answered first
    answer: list[Message]  # everything after the prompt: tool calls, results of tools, the last answer; may be empty
    tools: list[dict[str, Any]] = field(default_factory=list)
    scores: Mapping[str, float] = field(default_factory=dict)  # by name; the mean of several
    correction: str | None = None  # the answer that a person would have wanted
    subject: str | None = None  # the person whose data it is
    started_at: float = 0.0  # seconds since 1970
    duration_s: float = 0.0
    failed: bool = False  # ended with an error: its answer is no demonstration

    def __post_init__(self) -> None:
        """Raise BadTraceError or UserError if the trace has no question, or messages that no model can read."""
        if not any(message["role"] == "user" and message["content"] for message in self.prompt):
            raise BadTraceError("has no message of a user")
        conversation([*self.prompt, *self.answer], "messages")
        try:
            str([self.prompt, self.answer, self.tools, self.correction]).encode()
            self.trace_id.encode()
        except UnicodeEncodeError:
            raise BadTraceError("holds half of a surrogate pair, which is not a character") from None


def main_conversation(calls: Sequence[TracedCall]) -> tuple[list[Message], list[Message], list[dict[str, Any]]]:
    """The prompt, the answer and the tools of the trace's main conversation.

    The main conversation is that of the call with the most messages; of several, the last one. It begins where the
    first call began whose messages it continues: an agent's later calls repeat what was said before.
    """
    main = max(calls, key=lambda call: (len(call.messages), call.started_at))
    earlier = sorted(calls, key=lambda call: call.started_at)
    first = next(call for call in earlier if main.messages[: len(call.messages)] == call.messages)
    return first.messages, [*main.messages[len(first.messages) :], *main.answer], main.tools


def without_beginning(messages: list[Message], beginning: list[Message]) -> list[Message]:
    """The messages after ``beginning``: some agents return the whole conversation as their output."""
    return messages[len(beginning) :] if messages[: len(beginning)] == beginning else messages
