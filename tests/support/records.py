"""Parts of a round's record for tests."""

from typing import Any

from rft_platform.common.files import digest_json
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.selections import write_selection
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.record import Trained, write


def trained(**known: Any) -> Trained:
    """A training of no steps; ``known`` are the fields that matter."""
    empty: dict[str, Any] = {"metrics": {}, "seconds": {}, "steps": 0, "policy_version": 0, "cpu_seconds": 0.0}
    return Trained(**{"checkpoint": "checkpoint", "weights_digest": "digest", **empty, **known})


def result(**known: Any) -> EvaluationResult:
    """An evaluation of one task, which the policy failed; ``known`` are the fields that matter."""
    rates: dict[str, Any] = {"sampled": None, "greedy": None, "mean_reward": 0.0}
    counts = {"round": 0, "policy_version": 0, "tasks": 1, "sampled_n": 1, "failed_runs": 0, "completion_tokens": 0}
    settings = {"temperature": 1.0, "seed": 0, "pass_threshold": 1.0, "tasks_digest": "tasks", "measured_by": "judge"}
    return EvaluationResult(**{**rates, **counts, **settings, "truncated_share": 0.0, "seconds": 0.0, **known})


def selected(store: ExperienceStore, number: int, judge: str = "judge-1") -> dict[str, Any]:
    """The lineage of a training on all rows of a round, as its record has it."""
    uses: dict[str, list[str]] = {"fresh": [], "replay": [], "filtered": [], "stale": []}
    for row in store.judged_rows(number, judge):
        uses["fresh" if row.dropped_by is None else "filtered"].append(row.row_id)
    rows = [{"row_id": row_id, "round": number, "use": use} for use, ids in uses.items() for row_id in ids]
    selection = {
        "sha256": write_selection(store, number, rows),
        "rows": {use: len(ids) for use, ids in uses.items()},
        "judge_versions": {str(number): judge},
        "digests": {str(number): store.digest(number, judge_version=judge)},
    }
    lineage: dict[str, Any] = {"round": number, "data_digest": digest_json(selection), "judge_version": judge}
    lineage["row_selection"] = selection
    write(store, number, trained(lineage=lineage))
    return lineage
