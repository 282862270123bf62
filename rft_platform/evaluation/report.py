"""The evaluation report in Markdown: results beside those of start and champion, learning curve, transcripts."""

import base64
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rft_platform.common.files import atomic_path, write_text
from rft_platform.evaluation.comparison import Comparison, distinct
from rft_platform.evaluation.gate import GateDecision, RegressionResult
from rft_platform.evaluation.metrics import PassRate
from rft_platform.evaluation.results import EvaluationResult, Transcript

_MESSAGE_CHARS = 800
_MESSAGES = 8
_CURVE_FILE = "learning_curve.png"

_ROWS: tuple[tuple[str, Callable[[EvaluationResult], str]], ...] = (
    ("sampled pass rate (reward >= 1)", lambda r: _rate(r.sampled)),
    ("greedy pass rate (reward >= 1)", lambda r: _rate(r.greedy)),
    ("mean reward", lambda r: "–" if r.mean_reward is None else f"{r.mean_reward:.4f}"),
    ("held-out tasks × sampled runs", lambda r: f"{r.tasks:,} × {r.sampled_n} at temperature {r.temperature:g}"),
    ("completion tokens", lambda r: f"{r.completion_tokens:,} ({r.truncated_share:.1%} of answers cut off)"),
    ("failed runs", lambda r: f"{r.failed_runs:,}"),
    ("seconds", lambda r: f"{r.seconds:.1f}"),
)


def markdown_report(
    result: EvaluationResult,
    *,
    title: str,
    picture: str | None = None,
    start: EvaluationResult | None = None,
    champion: EvaluationResult | None = None,
    decision: GateDecision | None = None,
    compared: Sequence[Comparison] = (),
    regression: RegressionResult | None = None,
) -> str:
    """Return the report as Markdown. ``picture`` is the address of the curve: a file name or ``data_uri(png)``."""
    parts = [f"# {title}: round {result.round}, policy version {result.policy_version}"]
    if decision is not None:
        parts.append(f"**{_heading(decision)}** {decision.reason}")
    if regression is not None:
        heading = "Kept" if regression.decision.passed else "Worse than the start, or perhaps worse"
        parts.append(f"**{heading}:** {regression.decision.reason}")
    parts.append(_summary_table(result, start, champion))
    if compared:
        parts.append(comparison_table(compared))
    if picture is not None:
        parts.append(f"![learning curve]({picture})")
    parts.append(_metrics_table(result))
    if result.transcripts:
        parts += ["## Transcripts", *map(_transcript, result.transcripts)]
    return "\n\n".join(parts) + "\n"


def comparison_table(compared: Sequence[Comparison]) -> str:
    """Table with one row per metric and compared policy: the difference and its 95 % interval over tasks."""
    rows = [
        [f"{each.against} (v{each.policy_version}), {each.metric}", comparison_cell(each), each.verdict]
        for each in distinct(compared)
    ]
    return table(["difference from", "95 %, paired over tasks", ""], rows)


def comparison_cell(compared: Comparison) -> str:
    """Format a difference and its interval; that of pass rates as ``+12.5 points (+4.1 to +20.3)``."""
    points = compared.metric.endswith("_pass")
    values = (compared.difference, compared.low, compared.high)
    shown, low, high = (f"{100 * value:+.1f}" if points else f"{value:+.4f}" for value in values)
    return f"{shown}{' points' if points else ''} ({low} to {high})"


def data_uri(png: bytes) -> str:
    """Encode a picture as a data URI, for a page without other files."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def write_report(folder: Path, markdown: Callable[[str], str], png: bytes) -> Path:
    """Write ``report.md`` and its picture into ``folder``; ``markdown`` gets the address of the picture."""
    with atomic_path(folder / _CURVE_FILE) as temp:
        temp.write_bytes(png)
    path = folder / "report.md"
    write_text(path, markdown(_CURVE_FILE))
    return path


def stored_report(folder: Path) -> str | None:
    """The report that ``write_report`` wrote, as a page without other files; None if there is none."""
    try:
        page, png = (folder / "report.md").read_text(encoding="utf-8"), (folder / _CURVE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    return page.replace(f"({_CURVE_FILE})", f"({data_uri(png)})", 1)


def _heading(decision: GateDecision) -> str:
    if decision.passed:
        return "Gate passed:"
    return f"Not promoted: {decision.summary}." if decision.summary else "Not promoted:"


def _summary_table(result: EvaluationResult, start: EvaluationResult | None, champion: EvaluationResult | None) -> str:
    columns = [(f"this policy (v{result.policy_version})", result)]
    if champion is not None and champion.policy_version != result.policy_version:
        columns.append((f"champion (v{champion.policy_version})", champion))
    if start is not None and start.policy_version != result.policy_version:
        columns.append((f"start (v{start.policy_version})", start))
    rows = [[name, *(read(column) for _, column in columns)] for name, read in _ROWS]
    return table(["", *(name for name, _ in columns)], rows)


def _metrics_table(result: EvaluationResult) -> str:
    """Table with one row per taskset and metric, one column per statistic (mean@n, std@n, best@k, worst@k)."""
    rows: dict[str, dict[str, float]] = {}
    for name, value in result.metrics.items():
        row, _, statistic = name.removeprefix("eval/").rpartition("/")
        rows.setdefault(row, {})[statistic] = value
    statistics = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [[row, *(f"{rows[row][s]:.4f}" if s in rows[row] else "" for s in statistics)] for row in rows]
    return table(["taskset / metric", *statistics], cells)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column left-aligned, the others right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _rate(rate: PassRate | None) -> str:
    if rate is None:
        return "–"
    return f"**{rate.value:.1%}** ({rate.low:.1%} to {rate.high:.1%})"


def _transcript(transcript: Transcript) -> str:
    mark = f"{transcript.mode}, reward {transcript.reward:g}"
    expected = "" if transcript.expected is None else f", expected `{_shorten(transcript.expected, 80)}`"
    shown = transcript.messages
    skipped = len(shown) - _MESSAGES
    if skipped > 0:
        shown = [*shown[:2], {"role": "…", "content": f"{skipped} messages not shown"}, *shown[2 + skipped :]]
    return "\n\n".join([f"### Task {transcript.task_id[:12]}: {mark}{expected}", *map(_message, shown)])


def _message(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        text += f"\n→ {function.get('name')}({function.get('arguments')})"
    text = _shorten(text.strip("\n"), _MESSAGE_CHARS)
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"**{message.get('role', '?')}**\n{fence}text\n{text}\n{fence}"


def _shorten(text: str, limit: int) -> str:
    """Keep both ends of a long text, because an answer is usually at the end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
