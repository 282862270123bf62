"""What a judge may read of a run besides its response: the conversation, its steps, tool calls and their results.

``response_text`` extracts the text of a response, whatever type the workflow returned.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.record import RolloutRow


def response_text(response: Any) -> str:
    """Return the text of a response: a string, a chat message, a list of content parts, or an object with such content.

    Anything else is converted by ``str``; None is the empty text.
    """
    if response is None:
        return ""
    if isinstance(response, str):
        return response
    if isinstance(response, dict):
        key = next((key for key in ("content", "text") if key in response), None)
        return str(response) if key is None else response_text(response[key])
    if isinstance(response, list | tuple):
        return "\n".join(response_text(part) for part in response)
    content = getattr(response, "content", None)
    return str(response) if content is None else response_text(content)


def reference_text(task: dict[str, Any], answer_key: str) -> str:
    """Text of the task's answer column. Raises KeyError if there is no such column, ValueError if it is empty."""
    if answer_key not in task:
        raise KeyError(f"the task has no column {answer_key!r}; its columns are {', '.join(task)}")
    text = response_text(task[answer_key])
    if not text.strip():
        raise ValueError(f"the task's reference answer (column {answer_key!r}) is empty")
    return text


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call that the model requested, and its result."""

    name: str
    arguments: Any  # a JSON value; the text that the model wrote if it is not JSON
    result: str | None  # text from a later prompt; None: the run ended first, or the agent rewrote the history
    step: int
    is_json: bool = True  # whether ``arguments`` is a JSON object


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """One choice of a model call of a run. The choices of one call have the same ``step``."""

    step: int
    message: Mapping[str, Any]  # the assistant message
    response_tokens: int
    finish_reason: str
    truncated: bool
    step_reward: float | None = None
    env_state_hash: str | None = None
    policy: str = DEFAULT_POLICY  # name of the trainable policy that was called


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """One run of a workflow as its judge sees it. Read-only."""

    run_id: str
    task_id: str
    messages: tuple[Mapping[str, Any], ...]  # the last call's prompt and answer: usually the whole conversation
    steps: tuple[JudgedStep, ...]
    tool_calls: tuple[ToolCall, ...]
    tools: tuple[Mapping[str, Any], ...]  # offered tools, in wire format
    metrics: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None  # the workflow's own reward

    @property
    def response_tokens(self) -> int:
        """Number of sampled tokens of all steps."""
        return sum(step.response_tokens for step in self.steps)

    @property
    def truncated(self) -> bool:
        """Whether the last answer was cut off."""
        return self.steps[-1].truncated


def run_to_json(run: JudgedRun) -> dict[str, Any]:
    """Convert to plain values."""
    return asdict(run)


def run_from_json(value: Mapping[str, Any]) -> JudgedRun:
    """Restore a run from the output of ``run_to_json``."""
    steps = tuple(JudgedStep(**step) for step in value["steps"])
    calls = tuple(ToolCall(**call) for call in value["tool_calls"])
    texts = {name: tuple(value[name]) for name in ("messages", "tools")}
    return JudgedRun(**{**value, **texts, "steps": steps, "tool_calls": calls})


def judged_run(rows: Sequence[RolloutRow]) -> JudgedRun:
    """Return the judge's view of the run that ``rows`` record (all rows of one run, at least one)."""
    rows = sorted(rows, key=lambda row: row.step)
    last = rows[-1]
    tools = {json.dumps(tool, sort_keys=True): tool for row in rows for tool in row.call.tools or []}
    return JudgedRun(
        run_id=last.run_id,
        task_id=last.task_id,
        messages=(*last.call.messages, last.call.response),
        steps=tuple(map(_step, rows)),
        tool_calls=tuple(_tool_calls(rows)),
        tools=tuple(tools.values()),
        metrics=dict(last.call.metrics),
        reward=last.run_reward,
    )


def _step(row: RolloutRow) -> JudgedStep:
    return JudgedStep(
        row.step,
        row.call.response,
        len(row.call.response_ids),
        row.call.finish_reason,
        row.truncated,
        row.call.step_reward,
        row.call.env_state_hash,
        row.call.policy,
    )


def _tool_calls(rows: Sequence[RolloutRow]) -> list[ToolCall]:
    """Return every tool call that the model requested, with its result from a later prompt of the run (by id)."""
    calls = []
    for number, row in enumerate(rows):
        asked_for = row.call.response.get("tool_calls") or []
        later = _results([m for after in rows[number + 1 :] for m in _since(row, after)]) if asked_for else {}
        for call in asked_for:
            function = call.get("function") or {}
            arguments, is_json = _arguments(function.get("arguments"))
            result = later.get(str(call.get("id")))
            calls.append(ToolCall(str(function.get("name", "")), arguments, result, row.step, is_json))
    return calls


def _since(row: RolloutRow, later: RolloutRow) -> Sequence[Mapping[str, Any]]:
    """Messages of the prompt of ``later`` after those of ``row``; all of them if it is another conversation."""
    length = len(row.call.messages)
    return later.call.messages[length:] if later.call.messages[:length] == row.call.messages else later.call.messages


def _results(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    results: dict[str, str] = {}
    for message in messages:
        if message.get("role") == "tool" and message.get("tool_call_id") is not None:
            results.setdefault(str(message["tool_call_id"]), response_text(message.get("content")))
    return results


def _arguments(raw: Any) -> tuple[Any, bool]:
    if not isinstance(raw, str):
        return ({} if raw is None else raw), isinstance(raw, dict | None)
    try:
        value = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError):
        return raw, False
    return value, isinstance(value, dict)
