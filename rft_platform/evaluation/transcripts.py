"""Choose the runs of an evaluation that the report shows, as transcripts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rft_platform.experience.record import RolloutRow
from rft_platform.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Transcript:
    """One run to read: the conversation, the answer and its reward."""

    task_id: str
    mode: str  # "sampled" or "greedy"
    reward: float
    messages: list[dict[str, Any]]  # of the run's last call, including its answer
    expected: str | None = None


def transcript(row: RolloutRow, task: Task, mode: str, reward: float) -> Transcript:
    """Build the transcript of the run whose last model call is ``row``."""
    return Transcript(row.task_id, mode, reward, [*row.call.messages, row.call.response], task.answer)


def choose(transcripts: Sequence[Transcript], count: int, pass_threshold: float) -> list[Transcript]:
    """Choose up to ``count`` runs, at most one per task (its first): half failed and half passed, if possible."""
    firsts: dict[str, Transcript] = {}
    for found in transcripts:
        firsts.setdefault(found.task_id, found)
    failed = [found for found in firsts.values() if found.reward < pass_threshold - 1e-9]
    passed = [found for found in firsts.values() if found.reward >= pass_threshold - 1e-9]
    kept = failed[: max(count // 2, count - len(passed))]
    return [*kept, *passed[: count - len(kept)]]
