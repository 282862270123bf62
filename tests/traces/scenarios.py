"""Conversations of a support desk, by number: what each export of ``tests/traces/exports`` was made of.

Only the standard library is imported, because ``make_exports.py`` runs in an environment with the SDKs.
"""

import json
from dataclasses import dataclass
from typing import Any

SYSTEM = {"role": "system", "content": "You answer customers of a shop. Be brief."}
TOOL = {
    "type": "function",
    "function": {
        "name": "find_order",
        "description": "Find an order.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
START = 1_750_000_000  # seconds since 1970


@dataclass(frozen=True)
class Scenario:
    """One run of the agent: the model's calls, each with its messages and its answer."""

    number: int
    calls: list[tuple[list[dict[str, Any]], dict[str, Any]]]
    tools: list[dict[str, Any]]
    user: str | None = None
    helpful: float | None = None
    correction: str | None = None
    failed: bool = False

    @property
    def started_at(self) -> int:
        """Seconds since 1970."""
        return START + 10 * self.number


def scenario(number: int) -> Scenario:
    """Six kinds in turn: a scored answer, its worse twin, a tool call, a second question, a correction, a failure."""
    kind, of = number % 6, number // 6
    question = {"role": "user", "content": f"Where is order {of}? Grüße 🙂"}
    if kind in (0, 1):
        answer = {"role": "assistant", "content": f"Order {of} arrives today." if kind == 0 else "No idea."}
        return Scenario(number, [([SYSTEM, question], answer)], [], f"user-{of}", 1.0 if kind == 0 else 0.0)
    if kind == 2:
        return _with_tool(number, of, {"role": "user", "content": f"Did order {of} leave?"})
    if kind == 3:
        earlier = [SYSTEM, question, {"role": "assistant", "content": f"Order {of} is on its way."}]
        asked = [*earlier, {"role": "user", "content": "When does it arrive?"}]
        return Scenario(number, [(asked, {"role": "assistant", "content": f"In {of} days."})], [], f"user-{of}")
    asked = [SYSTEM, {"role": "user", "content": f"May I return order {of}?"}]
    if kind == 4:
        right = f"Yes, order {of} within 30 days."
        return Scenario(number, [(asked, {"role": "assistant", "content": "No."})], [], correction=right)
    return Scenario(number, [(asked, {"role": "assistant", "content": "Error"})], [], failed=True)


def _with_tool(number: int, of: int, question: dict[str, Any]) -> Scenario:
    """The model calls a tool, and then answers with its result."""
    function = {"name": "find_order", "arguments": json.dumps({"number": of})}
    call = {"id": f"call-{of}", "type": "function", "function": function}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": json.dumps({"left": True}), "tool_call_id": f"call-{of}"}
    asked = [SYSTEM, question]
    answer = {"role": "assistant", "content": f"Yes, order {of} left."}
    return Scenario(number, [(asked, called), ([*asked, called, result], answer)], [TOOL], f"user-{of}", 1.0)
