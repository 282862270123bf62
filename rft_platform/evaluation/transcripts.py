"""Which runs of an evaluation to keep for reading, and how."""

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
    messages: list[dict[str, Any]]  # of the run's last call, its answer included
    expected: str | None = None


def transcript(row: RolloutRow, task: Task, mode: str, reward: float) -> Transcript:
    """The run whose last model call is ``row``."""
    return Transcript(row.task_id, mode, reward, [*row.messages, row.response], task.answer)


def choose(transcripts: Sequence[Transcript], count: int, pass_threshold: float) -> list[Transcript]:
    """Up to ``count`` runs, the first of each task: as many failed as passed ones, where there are both."""
    firsts: dict[str, Transcript] = {}
    for found in transcripts:
        firsts.setdefault(found.task_id, found)
    failed = [found for found in firsts.values() if found.reward < pass_threshold - 1e-9]
    passed = [found for found in firsts.values() if found.reward >= pass_threshold - 1e-9]
    kept = failed[: max(count // 2, count - len(passed))]
    return [*kept, *passed[: count - len(kept)]]
