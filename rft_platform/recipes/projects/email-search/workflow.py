"""The agent of the recipe: tools ``search`` and ``read`` on a mailbox, and a reward for each call.

Rewards as in AgentScope's article on agentic RL: 1 for the right tool, 0.5 for right arguments, 1 for a call that
succeeds, -2 for an invalid call. The reward of a run is their mean over its calls, so that more calls earn nothing,
plus 1 for the right answer, divided by the highest possible sum: 1 is a run without any error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mail import Mailbox, Message, mailbox_of
from rft_platform.rollout.workflow import WorkflowOutput

RIGHT_TOOL, RIGHT_ARGUMENTS, SUCCESS, INVALID, RIGHT_ANSWER = 1.0, 0.5, 1.0, -2.0, 1.0
BEST = RIGHT_TOOL + RIGHT_ARGUMENTS + SUCCESS + RIGHT_ANSWER


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("search", "List at most six messages on a topic in a month.", topic="string", month="string"),
    _tool("read", "Return the text of a message.", id="string"),
]


@dataclass(frozen=True, slots=True)
class CallResult:
    """What one tool call returned, and how it is judged."""

    text: str
    right_tool: bool = False
    right_arguments: bool = False
    valid: bool = True

    @property
    def reward(self) -> float:
        """-2 if the call is invalid; otherwise 1 for its success and what tool and arguments earn."""
        if not self.valid:
            return INVALID
        return SUCCESS + RIGHT_TOOL * self.right_tool + RIGHT_ARGUMENTS * self.right_arguments


@dataclass(slots=True)
class Inquiry:
    """The tool calls of one run. ``search`` is right until the source is among the hits, then ``read`` is, once."""

    mailbox: Mailbox
    source: Message
    calls: list[CallResult] = field(default_factory=list)
    found: int = 0  # messages of the source's thread among the hits of the last search
    is_listed: bool = False
    is_read: bool = False

    def call(self, function: Mapping[str, str]) -> CallResult:
        """Run a tool call, judge it, and keep the result."""
        try:
            arguments = json.loads(function["arguments"])
            if function["name"] == "search":
                result = self._search(**arguments)
            elif function["name"] == "read":
                result = self._read(**arguments)
            else:
                raise ValueError(f"unknown tool {function['name']}")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            reason = "wrong arguments" if isinstance(error, TypeError | AttributeError) else str(error)
            result = CallResult(f"error: {reason[:60]}", valid=False)
        self.calls.append(result)
        return result

    def _search(self, topic: str = "", month: str = "") -> CallResult:
        hits = self.mailbox.search(topic, month)
        right_tool = not self.is_listed
        self.found = sum((hit.topic, hit.month) == (self.source.topic, self.source.month) for hit in hits)
        self.is_listed = self.is_listed or self.source in hits
        right = (topic, month) == (self.source.topic, self.source.month)
        return CallResult("\n".join(hit.id for hit in hits) or "nothing", right_tool, right)

    def _read(self, id: str) -> CallResult:
        message = self.mailbox.messages.get(id)
        if message is None:
            raise ValueError("no such message")
        right_tool, right = self.is_listed and not self.is_read, message == self.source
        self.is_read = self.is_read or right
        return CallResult(message.text, right_tool, right)

    def metrics(self, answer: str) -> dict[str, float]:
        """Shares of right tools, right arguments and invalid calls; messages found (0 to 6); whether it is answered."""
        count = max(1, len(self.calls))
        return {
            "tool_accuracy": sum(call.right_tool for call in self.calls) / count,
            "argument_accuracy": sum(call.right_arguments for call in self.calls) / count,
            "sources_found": float(self.found),
            "invalid_calls": sum(not call.valid for call in self.calls) / count,
            "calls": float(len(self.calls)),
            "answered": float(answer.strip() == str(self.source.number)),
        }

    def reward(self, answer: str) -> float:
        """1 for a run without error; lower for wrong or invalid calls, for none at all, and for a wrong answer."""
        mean = sum(call.reward for call in self.calls) / len(self.calls) if self.calls else INVALID
        return (mean + RIGHT_ANSWER * (answer.strip() == str(self.source.number))) / BEST


@dataclass(frozen=True, slots=True)
class EmailSearch:
    """Let the model search and read until it answers without a call, at most ``max_turns`` model calls."""

    mailbox: int = 0  # seed of the mailbox
    max_turns: int = 7

    async def run(self, task: Any, model: Any, auxiliary_models: Mapping[str, Any] | None = None) -> WorkflowOutput:
        """Return the reward, the answer as the response, and the metrics of ``Inquiry.metrics``."""
        mailbox = mailbox_of(self.mailbox)
        inquiry = Inquiry(mailbox, mailbox.messages[task.raw["source"]])
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        text = ""
        for _ in range(self.max_turns):
            message = await model.chat(messages, tools=TOOLS)
            calls = message.get("tool_calls") or []
            if not calls:
                text = message.get("content") or ""
                break
            messages = [*messages, message]
            for call in calls:
                result = inquiry.call(call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.text})
        return WorkflowOutput(reward=inquiry.reward(text), response=text, metrics=inquiry.metrics(text))
