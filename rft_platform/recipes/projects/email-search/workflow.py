"""The agent of the recipe: tools ``search`` and ``read`` on a mailbox. The judges of ``rft.yaml`` reward its calls."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mail import HITS, Mailbox, Message, mailbox_of
from rft_platform.rollout.workflow import WorkflowOutput

HANDLES = "abcdef"[:HITS]  # names of the hits of the last search, by place


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("search", "List at most six messages on a topic in a month.", topic="string", month="string"),
    _tool("read", "Return the text of a hit of the last search.", hit="string"),
]


@dataclass(frozen=True, slots=True)
class CallResult:
    """What one tool call returned, and how it is judged."""

    text: str
    right_tool: bool = False
    right_arguments: bool = False
    valid: bool = True


@dataclass(slots=True)
class Inquiry:
    """The tool calls of one run. ``search`` is right until the source is among the hits, then ``read`` is, once."""

    mailbox: Mailbox
    source: Message
    calls: list[CallResult] = field(default_factory=list)
    hits: list[Message] = field(default_factory=list)  # of the last search
    is_read: bool = False

    @property
    def is_listed(self) -> bool:
        """Whether the source is among the hits."""
        return self.source in self.hits

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
        right_tool = not self.is_listed and not self.is_read
        self.hits = self.mailbox.search(topic, month)
        lines = [f"- {hit.sender} {handle} {hit.subject}" for handle, hit in zip(HANDLES, self.hits, strict=False)]
        right = (topic, month) == (self.source.topic, self.source.month)
        return CallResult("\n".join(lines) or "nothing", right_tool, right)

    def _read(self, hit: str) -> CallResult:
        if hit not in HANDLES[: len(self.hits)] or len(hit) != 1:
            raise ValueError("no such hit")
        message = self.hits[HANDLES.index(hit)]
        right_tool, right = self.is_listed and not self.is_read, message == self.source
        self.is_read = self.is_read or right
        return CallResult(message.text, right_tool, right)

    def metrics(self, answer: str) -> dict[str, float]:
        """Shares of right tools, right arguments and invalid calls; messages found (0 to 6); whether it is answered.

        Found are the messages of the source's thread among the hits of the last search.
        """
        count = max(1, len(self.calls))
        thread = (self.source.topic, self.source.month)
        return {
            "tool_accuracy": sum(call.right_tool for call in self.calls) / count,
            "argument_accuracy": sum(call.right_arguments for call in self.calls) / count,
            "messages_found": float(sum((hit.topic, hit.month) == thread for hit in self.hits)),
            "invalid_calls": sum(not call.valid for call in self.calls) / count,
            "calls": float(len(self.calls)),
            "answered": float(answer == str(self.source.number)),
        }


def right_calls(mailbox: Mailbox, source: Message) -> list[dict[str, Any]]:
    """The two calls of a run without an error."""
    search = {"topic": str(source.topic), "month": source.month}  # a question's source has a topic
    hit = HANDLES[mailbox.search(**search).index(source)]
    return [{"name": "search", "arguments": search}, {"name": "read", "arguments": {"hit": hit}}]


@dataclass(frozen=True, slots=True)
class EmailSearch:
    """Let the model search and read until it answers without a call, at most ``max_turns`` model calls."""

    mailbox: int = 0  # seed of the mailbox
    max_turns: int = 7

    async def run(self, task: Any, model: Any, auxiliary_models: Mapping[str, Any] | None = None) -> WorkflowOutput:
        """Return the number that ends the answer as the response, and the metrics of ``Inquiry.metrics``."""
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
        number = text.strip().rpartition(" ")[2]
        return WorkflowOutput(response=number, metrics=inquiry.metrics(number))
