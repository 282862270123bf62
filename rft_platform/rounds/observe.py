"""What a project has reached: found on disk, joined with what the orchestrator knows of its launches."""

from dataclasses import dataclass, field
from typing import Any

from rft_platform.rounds.curve import EVALUATION
from rft_platform.rounds.judge import NOTE as JUDGE
from rft_platform.rounds.policy import published
from rft_platform.rounds.project import Project
from rft_platform.rounds.state import PhaseState, ProjectState, RoundState


@dataclass(frozen=True, slots=True)
class Launches:
    """Phases under way and failed launches, by (kind, round)."""

    running: frozenset[tuple[str, int]] = frozenset()
    failures: dict[tuple[str, int], int] = field(default_factory=dict)

    def phase(self, kind: str, number: int, done: bool) -> PhaseState:
        """One phase as the plan wants to see it."""
        return PhaseState(done, (kind, number) in self.running, self.failures.get((kind, number), 0))


def observe(project: Project, launches: Launches) -> ProjectState:
    """The state that ``plan_next`` decides on. Reads notes and Parquet footers only."""
    mode = project.config.mode
    return ProjectState(
        rounds=tuple(_observe_round(project, launches, number) for number in range(1, _begun(project, launches) + 1)),
        rounds_budget=project.rounds_budget,
        experiences_needed=project.experiences_a_round,
        sync_offset=project.config.synchronizer.offset_rounds,
        warm_start=launches.phase("warm_start", 0, done=project.store.read_note(0, EVALUATION) is not None),
        mode=mode if mode in ("explore", "train") else "both",
    )


def _begun(project: Project, launches: Launches) -> int:
    """The highest round that anything is known of."""
    numbers = [*project.store.rounds(), *(number for _, number in [*launches.running, *launches.failures])]
    return max(numbers, default=0)


def _is_sound(judge_note: dict[str, Any] | None) -> bool:
    """Rows that a blocking check refuses are not waited on as if they could train."""
    return bool(judge_note and judge_note["sound"])


def _observe_round(project: Project, launches: Launches, number: int) -> RoundState:
    store = project.store
    policy = published(store, number)
    evaluated = policy is not None and store.read_note(number, EVALUATION) is not None
    sound = _is_sound(store.read_note(number, JUDGE))
    return RoundState(
        number,
        explore=launches.phase("explore", number, done=sound or policy is not None),
        sync=launches.phase("sync", number, done=evaluated),
        experiences=store.count_judged(number) if sound else 0,
        policy_version=None if policy is None else policy.policy_version,
    )
