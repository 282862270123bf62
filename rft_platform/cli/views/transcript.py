"""Print a run: its messages in order, its tokens, its rows and its reward."""

import json
import math
from typing import TYPE_CHECKING, Any

from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.common.redaction import visible
from rft_platform.run.console import table

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.experience.record import RolloutRow
    from rft_platform.run.debug import DebugRun

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_UNUSUAL = (
    "note: the reward {:g} is outside 0 to 1: pass rates count a run as passed from a reward of 1; scale the judge's "
    "rewards if 1 does not mean solved"
)
_SHOWN = 2000  # characters of a message
#: Log-prob of a token from which its colour is used, the likeliest first.
_LIKELY = ((-0.1, "white"), (-1.0, "green"), (-3.0, "yellow"), (-math.inf, "red"))


def print_run(found: "DebugRun", console: "Console", *, tokens: bool, reward: bool = True) -> None:
    """Print the transcript, a table of the rows, and the reward. ``tokens``: also the log-prob of every token."""
    console.print(f"task {found.task.task_id} of {found.task.taskset}: {_json(found.task.raw)}", markup=False)
    printed: list[list[dict[str, Any]]] = []  # the conversation after each call
    if tools := {str(tool.get("function", tool).get("name")): None for row in found.rows for tool in row.call.tools}:
        console.print(f"tools: {', '.join(tools)}", markup=False)
    for row, pieces in zip(found.rows, found.pieces, strict=True):
        messages = row.call.messages
        known = max((len(each) for each in printed if messages[: len(each)] == each), default=0)
        if printed and known != len(printed[-1]):
            console.print("(the agent continues with other messages)", style="dim")
        for message in messages[known:]:
            _print_message(message, console)
        _print_message(row.call.response, console, _step(row))
        if tokens and pieces:
            _print_tokens(row, pieces, console)
        printed.append([*messages, row.call.response])
    output = found.rows[-1].run_output
    if output is not None and output != found.rows[-1].call.response_text:
        console.print(f"the workflow returned {_json(output)}", markup=False, soft_wrap=True)
    if any(row.call.response_ids for row in found.rows):
        console.print(_rows_table(found))
    if reward:
        _print_reward(found, console)


def run_json(found: "DebugRun") -> dict[str, Any]:
    """The run as JSON values."""
    judgement = found.judgement
    return {
        "task": found.task.raw,
        "seconds": round(found.seconds, 3),
        "calls": [
            {
                "step": row.step,
                "policy": row.call.policy,
                "messages": row.call.messages,
                "tools": row.call.tools,
                "response": row.call.response,
                "finish_reason": row.call.finish_reason,
                "prompt_tokens": len(row.call.prompt_ids),
                "response_ids": row.call.response_ids,
                "rollout_logprobs": row.call.rollout_logprobs,
                "loss_mask": row.loss_mask,
                "metrics": row.call.metrics,
            }
            for row in found.rows
        ],
        "judge": found.judge,
        "reward": None if judgement is None or judgement.error else judgement.reward,
        "rewards": {} if judgement is None else dict(judgement.rewards),
        "reward_parts": {} if judgement is None else dict(judgement.parts),
        "judge_error": None if judgement is None else judgement.error,
    }


def _step(row: "RolloutRow") -> str:
    """The step of a call, and its policy if that is not the first one."""
    policy = row.call.policy
    return f"step {row.step}" if policy == DEFAULT_POLICY else f"step {row.step}, policy {policy}"


def _print_message(message: dict[str, Any], console: "Console", note: str = "") -> None:
    role = str(message.get("role", "?"))
    name = f"{role} ({note})" if note else role
    console.print(name, style=f"bold {_ROLES.get(role, 'white')}", markup=False)
    if content := message.get("content"):
        text = content if isinstance(content, str) else _json(content)
        cut = f" ... ({len(text):,} characters)" if len(text) > _SHOWN else ""
        console.print(f"  {visible(text[:_SHOWN])}{cut}", markup=False, highlight=False, soft_wrap=True)
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        line = f"  calls {function.get('name')}({function.get('arguments', '')})"
        console.print(visible(line), style="yellow", markup=False, soft_wrap=True)


def _print_tokens(row: "RolloutRow", pieces: list[str], console: "Console") -> None:
    """Each token with its log-prob; a token that is not trained on is dim."""
    from rich.text import Text

    line = Text("  ")
    for piece, logprob, trained in zip(pieces, row.call.rollout_logprobs, row.loss_mask, strict=True):
        colour = next(colour for least, colour in _LIKELY if logprob >= least)
        shown = visible(piece.replace("\n", "\\n")) or "<special>"
        line.append(f"{shown}", style=colour if trained else "dim").append(f"[{logprob:.2f}] ", style="dim")
    console.print(line, soft_wrap=True)


def _rows_table(found: "DebugRun") -> Any:
    columns = ("step", "prompt tokens", "response tokens", "trained on", "mean log-prob", "finish", "seconds")
    rows = table(*columns, left=["finish"], title="rows", no_wrap=True)
    for row in found.rows:
        call = row.call
        mean = sum(call.rollout_logprobs) / max(len(call.rollout_logprobs), 1)
        finish = f"{call.finish_reason}{', truncated' if row.truncated else ''}"
        rows.add_row(
            str(row.step), f"{len(call.prompt_ids):,}", f"{len(call.response_ids):,}", f"{sum(row.loss_mask):,}",
            f"{mean:.3f}", finish, f"{call.duration_s:.2f}",
        )  # fmt: skip
    return rows


def _print_reward(found: "DebugRun", console: "Console") -> None:
    judgement, by = found.judgement, found.judge or "the workflow"
    if judgement is None:
        console.print("no reward: neither the workflow nor a judge gives one; name a judge with --judge", style="bold")
        return
    if judgement.error is not None:
        console.print(f"{by} failed: {visible(judgement.error)}", style="bold red", markup=False, soft_wrap=True)
        return
    parts = ", ".join(f"{name} {value:g}" for name, value in judgement.parts.items())
    metrics = {name: value for row in found.rows for name, value in row.call.metrics.items()}
    shown = ", ".join(f"{name} {value:g}" for name, value in metrics.items())
    console.print(f"reward {judgement.reward:g} by {by}{f' ({parts})' if parts else ''}", style="bold", markup=False)
    for name, reward in judgement.rewards.items():
        console.print(f"reward {reward:g} of policy {name}", style="bold", markup=False)
    if found.judge is not None and not 0 <= judgement.reward <= 1:
        console.print(_UNUSUAL.format(judgement.reward), style="yellow", markup=False, soft_wrap=True)
    if shown:
        console.print(f"metrics: {shown}", markup=False, soft_wrap=True)
    console.print(f"{found.seconds:.1f} s", style="dim")


def _json(value: Any) -> str:
    return visible(json.dumps(value, ensure_ascii=False, default=str))
