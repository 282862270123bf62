"""Make preference pairs from judged groups: of two runs of a task the better is chosen, the worse rejected."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from rft_platform.common.errors import UserError
from rft_platform.common.files import atomic_path
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.record import REWARD_ROUNDING, JudgedRow, RolloutRow

Which = Literal["extremes", "all"]


@dataclass(slots=True)
class PreferencePairs:
    """Rows with ``prompt``, ``chosen`` and ``rejected`` (messages), ``tools`` if any, rewards and ids of both runs."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    groups: int = 0
    without_pair: int = 0  # groups whose rewards differ too little, or whose runs do not first differ in an answer


def preference_pairs(
    rows: Sequence[RolloutRow], judged: Iterable[JudgedRow], *, least_margin: float = 0.0, which: Which = "extremes"
) -> PreferencePairs:
    """Return pairs of runs of one group whose rewards differ, and by ``least_margin`` or more.

    Only the first policy's calls and rewards count. ``extremes``: the best with the worst, one pair per group. ``all``:
    every two runs. Runs without a reward are left out. A pair consists of the first two answers that differ after an
    equal history. Two runs give no pair if they first differ in something else (another result of the same tool call, a
    rewritten history).
    """
    by_row = {row.row_id: row.reward for row in judged if math.isfinite(row.reward)}
    own = [row for row in rows if row.call.policy == DEFAULT_POLICY and row.row_id in by_row]
    reward = {row.run_id: by_row[row.row_id] for row in own}
    runs: dict[str, dict[str, list[RolloutRow]]] = {}
    for row in own:
        runs.setdefault(row.group_id, {}).setdefault(row.run_id, []).append(row)
    found = PreferencePairs(groups=len(runs))
    for of_run in runs.values():
        best_first = sorted(of_run, key=lambda run_id: -reward[run_id])
        ends = [(best_first[0], best_first[-1])]
        candidates = [
            _pair(of_run[better], of_run[worse], reward)
            for better, worse in (combinations(best_first, 2) if which == "all" else ends)
            if reward[better] - reward[worse] > max(REWARD_ROUNDING, least_margin - REWARD_ROUNDING)
        ]
        made = [pair for pair in candidates if pair is not None]
        found.rows += made
        found.without_pair += not made
    return found


def write_pairs(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write pairs as a dataset for DPO training: JSONL or Parquet, by the file's suffix.

    Parquet stores messages as JSON text: read it with ``format.prompt_type: chatpair``. Raises UserError for another
    suffix, and if there is no pair.
    """
    if file.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{file}: expected a .jsonl or .parquet file for preference pairs")
    if not rows:
        raise UserError(
            f"{file}: there is no pair to write: no two runs of one task differ in their reward (by --margin or more) "
            "and in an answer to the same messages. Give other rounds, --all-pairs or a smaller --margin"
        )
    with atomic_path(file) as temp:
        if file.suffix == ".jsonl":
            temp.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        as_text = ("prompt", "chosen", "rejected", "tools")  # Parquet needs one type; messages differ in their fields
        columns = dict.fromkeys(key for row in rows for key in row)  # from_pylist takes those of the first row
        table = {key: [_as_text(row.get(key)) if key in as_text else row.get(key) for row in rows] for key in columns}
        pq.write_table(pa.table(table), temp)


def _as_text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _pair(better: list[RolloutRow], worse: list[RolloutRow], reward: Mapping[str, float]) -> dict[str, Any] | None:
    """Pair the first answers of two runs that differ after the same messages.

    None if the messages of the runs differ before that, or if all answers are equal.
    """
    steps = zip(*(sorted(run, key=lambda row: row.step) for run in (better, worse)), strict=False)
    for chosen, rejected in steps:
        if _without_ids(chosen.call.messages) != _without_ids(rejected.call.messages):
            return None
        if _without_ids([chosen.call.response]) != _without_ids([rejected.call.response]):
            return {
                "prompt": list(chosen.call.messages),
                "chosen": [chosen.call.response],
                "rejected": [rejected.call.response],
                **({"tools": list(chosen.call.tools)} if chosen.call.tools else {}),
                "chosen_reward": reward[chosen.run_id],
                "rejected_reward": reward[rejected.run_id],
                "chosen_run": chosen.run_id,
                "rejected_run": rejected.run_id,
                "step": chosen.step,
                "task_id": chosen.task_id,
            }
    return None


def _without_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without the ids of tool calls, which differ in every run."""
    return [
        {
            name: [{part: call[part] for part in call if part != "id"} for call in value]
            if name == "tool_calls" and value
            else value
            for name, value in message.items()
            if name != "tool_call_id"
        }
        for message in messages
    ]
