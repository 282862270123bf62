"""Choose the committed rows of the next round: whole tasks, no stale tasks, and a limited share for each subject."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RoundRule:
    """How the rows of a round are chosen."""

    most_rows: int | None = None  # limit of a round's rows; None: no limit
    oldest_version: int | None = None  # a task that only older policy versions sampled is stale; None: none is stale
    subject_share: float = 1.0  # the share of ``most_rows`` that one subject may have

    @property
    def most_of_subject(self) -> float:
        """Rows that a round may take of one subject; at least one."""
        if self.most_rows is None or self.subject_share >= 1:
            return math.inf
        return max(1, math.floor(self.subject_share * self.most_rows))


@dataclass(frozen=True, slots=True)
class CommittedRow:
    """The values of a committed row that the choice depends on."""

    number: int
    task: tuple[str, str]  # tenant and task
    subject: tuple[str, str] | None  # tenant and subject; None: unknown, not limited
    policy_version: int | None


@dataclass(slots=True)
class ChosenRows:
    """Numbers of chosen and other rows, in the order of their commit."""

    chosen: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)  # the round has no room for them
    stale: list[int] = field(default_factory=list)  # too old for any round
    above_share: list[int] = field(default_factory=list)  # wait for a later round: their subject has its share


def choose_rows(rows: Iterable[CommittedRow], rule: RoundRule) -> ChosenRows:
    """Choose the rows of a round from all committed ones, in the order of their commit.

    The first task of a subject is taken even if it is larger than the subject's share: a task is never split.
    """
    tasks: dict[tuple[str, str], list[CommittedRow]] = {}
    for row in rows:
        tasks.setdefault(row.task, []).append(row)
    found, taken, full = ChosenRows(), Counter[tuple[str, str]](), False
    for task in tasks.values():
        numbers = [row.number for row in task]
        subjects = Counter(row.subject for row in task if row.subject is not None)
        if _is_stale(task, rule.oldest_version):
            found.stale += numbers
        elif any(taken[name] and taken[name] + count > rule.most_of_subject for name, count in subjects.items()):
            found.above_share += numbers
        else:
            size = len(found.chosen)
            full = full or (rule.most_rows is not None and size > 0 and size + len(numbers) > rule.most_rows)
            (found.later if full else found.chosen).extend(numbers)
            taken.update(subjects)
    return found


def _is_stale(task: list[CommittedRow], oldest_version: int | None) -> bool:
    """Whether policy versions older than ``oldest_version`` sampled all rows of a task."""
    if oldest_version is None:
        return False
    return all(row.policy_version is not None and row.policy_version < oldest_version for row in task)
