"""A few runs of a round for people to read, without DuckDB, whose import and start cost more than the reading."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rft_platform.experience.store import ExperienceStore

_DOCUMENTS = ("messages", "response", "run_output")


def rollout_transcripts(store: ExperienceStore, round: int, n: int) -> list[dict[str, Any]]:
    """At most ``n`` runs of a round, evenly spaced from the highest reward to the lowest; deterministic.

    Keys: ``run_id, task_id, reward, steps, messages, response, run_output``; messages and response are those of the
    last step, and its first choice. The reward is None if there is no judgement, or if the judge failed.
    """
    names = store.read_rollouts(round, columns=["row_id", "run_id", "task_id", "step"])
    judged = store.read_judged(round, columns=["row_id", "reward"])
    rewards = dict(zip(judged["row_id"].to_pylist(), judged["reward"].to_pylist(), strict=True))
    last: dict[str, dict[str, Any]] = {}
    for row in sorted(names.to_pylist(), key=lambda row: (-row["step"], row["row_id"])):
        last.setdefault(row["run_id"], {**row, "reward": rewards.get(row["row_id"])})
    runs = sorted(last.values(), key=_best_first)
    if len(runs) > n:
        runs = [runs[index * (len(runs) - 1) // max(n - 1, 1)] for index in range(n)]
    texts = _texts(store, round, [run["row_id"] for run in runs])
    return [
        {
            **{name: run[name] for name in ("run_id", "task_id", "reward")},
            "steps": run["step"] + 1,
            **{name: None if text is None else json.loads(text) for name, text in texts[run["row_id"]].items()},
        }
        for run in runs
    ]


def _best_first(run: dict[str, Any]) -> tuple[bool, float, str]:
    reward = run["reward"]
    return reward is None, 0.0 if reward is None else -reward, run["run_id"]


def _texts(store: ExperienceStore, round: int, row_ids: list[str]) -> dict[str, dict[str, str | None]]:
    """The JSON documents of some rows, by row id."""
    table = store.read_rollouts(round, columns=["row_id", *_DOCUMENTS])
    chosen = table.filter(pc.is_in(table["row_id"], pa.array(row_ids, pa.string()))).to_pylist()
    return {row.pop("row_id"): row for row in chosen}
