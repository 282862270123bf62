"""Choose runs of a round for MLflow's traces, and read them with their judgement."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rft_platform.experience.record import POLICY_REWARD
from rft_platform.model_registry.run_traces import GivenFeedback, JudgedTranscript, log_traces
from rft_platform.rounds.project.notes import JUDGE
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.selection.production_rows import traffic_database
from rft_platform.serving.reports.user_feedback import feedback_on

if TYPE_CHECKING:
    from rft_platform.experience.record import RolloutRow
    from rft_platform.model_registry.models import ModelRegistry

_JUDGED = ["run_id", "step", "reward", "reward_parts", "dropped_by"]


def log_round_traces(project: Project, registry: "ModelRegistry", round_number: int) -> int:
    """Log ``monitor.traces`` runs of a round to MLflow; return their number."""
    count = project.config.monitor.traces
    if not count:
        return 0
    run = registry.training_run(project.config.name)
    return log_traces(run, registry.tracking_uri, transcripts(project, round_number, count))


def transcripts(project: Project, round_number: int, count: int) -> list[JudgedTranscript]:
    """Runs of a round in order of their rewards, from the lowest to the highest one, at most ``count``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from rft_platform.experience.schema import table_to_rows

    store, version = project.store, project.store.judge_version(round_number)
    if version is None:
        return []
    judged = {
        row["run_id"]: row
        for row in store.read_judged(round_number, version, columns=_JUDGED).to_pylist()
        if row["reward"] is not None
    }
    chosen = spread(sorted(judged, key=lambda run_id: (judged[run_id]["reward"], run_id)), count)
    table = store.read_rollouts(round_number)
    rows = table_to_rows(table.filter(pc.is_in(table["run_id"], pa.array(chosen, pa.string()))))
    texts = not project.config.online  # of production traffic MLflow gets no messages
    feedback = {} if texts else _feedback(project, rows)
    names = (store.read_note(round_number, JUDGE) or {}).get("judge_names", {})
    judge = f"{names.get(version, '')} {version}".strip()
    return [
        JudgedTranscript(
            calls=sorted((row for row in rows if row.run_id == run_id), key=lambda row: (row.step, row.row_id)),
            rewards=_rewards(judged[run_id]),
            judge=judge,
            by_model="llm" in judge,
            dropped_by=judged[run_id]["dropped_by"],
            with_texts=texts,
            feedback=feedback.get(run_id, ()),
        )
        for run_id in chosen
    ]


def _feedback(project: Project, rows: Sequence["RolloutRow"]) -> dict[str, list[GivenFeedback]]:
    """What users said about the runs of production traffic, by run; each feedback once."""
    given = feedback_on(traffic_database(project), sorted({row.call.msg_id for row in rows}))
    found: dict[str, dict[str, GivenFeedback]] = {}
    for row in rows:
        for each in given.get(row.call.msg_id, ()):
            found.setdefault(row.run_id, {})[each.feedback_id] = each
    return {run_id: list(by_id.values()) for run_id, by_id in found.items()}


def spread(ordered: Sequence[str], count: int) -> list[str]:
    """At most ``count`` items at equal distances, the first and the last one among them."""
    if len(ordered) <= count:
        return list(ordered)
    return [ordered[round(index * (len(ordered) - 1) / max(count - 1, 1))] for index in range(count)]


def _rewards(judged: dict[str, Any]) -> dict[str, float]:
    parts = {name: value for name, value in judged["reward_parts"] if not name.startswith(POLICY_REWARD)}
    return {**parts, "reward": judged["reward"]}
