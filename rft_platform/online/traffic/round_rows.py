"""The committed rows that the next round takes (whole tasks, no stale ones, limited shares), as rollout rows.

An owner is an answer, a task, a subject, all rows of a tenant without a subject, or a tenant. Without limits a single
rating, user or API key could fill a round.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median_high
from typing import Any, Literal, TypeAlias

from rft_platform.experience.record import LARGEST_TOP_K, ModelCall, RolloutRow, row_id
from rft_platform.online.traffic.database import Call
from rft_platform.online.traffic.incoming import ENGINE, TEMPLATE_HASH

Kind: TypeAlias = Literal["answer", "task", "subject", "tenant"]
Task: TypeAlias = tuple[str, str]  # tenant and task

#: Automatic limits apply from this number of owners of a kind: fewer could not fill a round if each had a tenth of it.
LEAST_OWNERS = 10
_TENTH, _QUARTER = 0.1, 0.25
_EQUAL_SHARES = 2  # a subject or tenant may have twice the share that all of them would have if they had equal ones
_TASKS_OF_A_SUBJECT = 2  # an automatic limit of a subject or tenant allows this number of median tasks
_MEDIAN_TASKS = 8  # the automatic limit of a task allows this number of times the rows of the median task


@dataclass(frozen=True, slots=True)
class RoundRule:
    """How the rows of a round are chosen. A share of None is the automatic limit (``docs/online.md``); 1: no limit."""

    most_rows: int | None = None  # limit of a round's rows; None: no limit, and no limit of any owner
    oldest_version: int | None = None  # a task that only older policy versions sampled is stale; None: none is stale
    most_choices: int | None = None  # rows of one answer; None: no limit
    task_share: float | None = None  # the share of ``most_rows`` that one task may have
    subject_share: float | None = None  # the same for a subject, and for the rows of a tenant without a subject
    tenant_share: float | None = None  # the same for a tenant


@dataclass(frozen=True, slots=True)
class CommittedRow:
    """The values of a committed row that the choice depends on."""

    number: int
    tenant: str
    task: str  # the task, or the message if the row has no task
    msg_id: str
    subject: str | None
    policy_version: int | None


#: The owner of a row of each kind; all rows of a tenant without a subject have one owner.
_OWNERS: dict[Kind, Callable[[CommittedRow], object]] = {
    "answer": attrgetter("tenant", "msg_id"),
    "task": attrgetter("tenant", "task"),
    "subject": attrgetter("tenant", "subject"),
    "tenant": attrgetter("tenant"),
}


@dataclass(slots=True)
class ChosenRows:
    """Numbers of chosen and other rows, in the order of their commit."""

    chosen: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)  # the round has no room for them
    stale: list[int] = field(default_factory=list)  # too old for any round
    above_share: list[int] = field(default_factory=list)  # wait for a later round, or become stale: above a limit

    @property
    def waiting(self) -> int:
        """Number of rows that the next rounds may take."""
        return len(self.chosen) + len(self.later)


def choose_rows(rows: Iterable[CommittedRow], rule: RoundRule) -> ChosenRows:
    """Choose the rows of a round from all committed ones, in the order of their commit.

    A task is taken whole or not at all. A task that would exceed the limit of one of its owners is not taken.
    """
    tasks: dict[Task, list[CommittedRow]] = {}
    for row in rows:
        tasks.setdefault((row.tenant, row.task), []).append(row)
    found = ChosenRows()
    for name in [name for name, task in tasks.items() if _is_stale(task, rule.oldest_version)]:
        found.stale += [row.number for row in tasks.pop(name)]
    limits = [_Limit(most, _OWNERS[kind]) for kind, most in _limits(tasks, rule).items() if math.isfinite(most)]
    full = False
    for task in tasks.values():
        numbers = [row.number for row in task]
        if not all(limit.allows(task) for limit in limits):
            found.above_share += numbers
            continue
        size = len(found.chosen)
        full = full or (rule.most_rows is not None and size > 0 and size + len(numbers) > rule.most_rows)
        (found.later if full else found.chosen).extend(numbers)
        for limit in limits:
            limit.take(task)
    return found


class _Limit:
    """The limit of all owners of one kind, and the rows that each has already."""

    def __init__(self, most: float, owner: Callable[[CommittedRow], object]) -> None:
        self._most = most
        self._owner = owner
        self._taken: dict[object, int] = {}

    def allows(self, task: list[CommittedRow]) -> bool:
        """Whether no owner of the task's rows would have more than the limit."""
        return all(self._taken.get(owner, 0) + rows <= self._most for owner, rows in self._counted(task).items())

    def take(self, task: list[CommittedRow]) -> None:
        """Count the rows of a task for their owners."""
        for owner, rows in self._counted(task).items():
            self._taken[owner] = self._taken.get(owner, 0) + rows

    def _counted(self, task: list[CommittedRow]) -> Mapping[object, int]:
        return {self._owner(task[0]): 1} if len(task) == 1 else Counter(map(self._owner, task))


def _limits(tasks: dict[Task, list[CommittedRow]], rule: RoundRule) -> dict[Kind, float]:
    """The largest number of a round's rows for an owner of each kind."""
    if rule.most_rows is None:
        return dict.fromkeys(("answer", "task", "subject", "tenant"), math.inf)
    most, usual = rule.most_rows, median_high(map(len, tasks.values())) if tasks else 1
    subjects = len({(row.tenant, row.subject) for task in tasks.values() for row in task if row.subject is not None})
    tenants = len({tenant for tenant, _ in tasks})

    def equal(owners: int) -> float:
        return max(_TENTH * most, _EQUAL_SHARES * most / max(1, owners), _TASKS_OF_A_SUBJECT * usual)

    large = max(_QUARTER * most, _MEDIAN_TASKS * usual)
    return {
        "answer": rule.most_choices or math.inf,
        "task": _limit(most, rule.task_share, len(tasks), large),
        "subject": _limit(most, rule.subject_share, subjects, equal(subjects)),
        "tenant": _limit(most, rule.tenant_share, tenants, equal(tenants)),
    }


def _limit(most_rows: int, share: float | None, owners: int, automatic: float) -> float:
    """The limit of one kind of owners, of which there are ``owners``; 0 owners: all rows are without a subject."""
    if share is None:
        return automatic if owners >= LEAST_OWNERS else math.inf
    return math.inf if share >= 1 or owners == 0 else max(1, math.floor(share * most_rows))


def _is_stale(task: list[CommittedRow], oldest_version: int | None) -> bool:
    """Whether policy versions older than ``oldest_version`` sampled all rows of a task."""
    if oldest_version is None:
        return False
    return all(row.policy_version is not None and row.policy_version < oldest_version for row in task)


def rows_of_traffic(calls: list[Call], round_number: int) -> list[RolloutRow]:
    """Rollout rows of a round's calls: the calls of one task form a group, and the calls of one run are its steps.

    The last row of a run has the run's reward, which is the reward of the last call with feedback.
    """
    steps: Counter[str] = Counter()
    last: dict[str, RolloutRow] = {}
    rows = []
    for call in calls:
        run = run_name(call)
        row = _row(call, run, steps[run], round_number)
        steps[run] += 1
        last[run] = row
        rows.append(row)
    rewards = {run_name(call): call.reward for call in calls}
    for run, row in last.items():
        row.run_reward = rewards[run]
        row.run_output = row.call.response.get("content")
    return rows


def _task_of(call: Call) -> str:
    """Name of the task; each tenant has its own tasks."""
    return f"{call.tenant}/{call.task_id}" if call.tenant else str(call.task_id)


def run_name(call: Call) -> str:
    """Name of the run; each further choice of an answer is a separate run.

    The name is unique, because its last part is the run id, in which slashes are escaped.
    """
    run = str(call.run_id).replace("%", "%25").replace("/", "%2F")
    return f"online{f':{call.choice}' if call.choice else ''}/{_task_of(call)}/{run}"


def _row(call: Call, run: str, step: int, round_number: int) -> RolloutRow:
    recorded: dict[str, Any] = dict(call.model_call)
    engine, template_hash = recorded.pop(ENGINE), recorded.pop(TEMPLATE_HASH)
    model_call = ModelCall(**recorded)
    model_call.top_k = min(model_call.top_k, LARGEST_TOP_K)
    return RolloutRow(
        row_id=row_id(call.msg_id, 0, call.choice),
        task_id=_task_of(call),
        taskset="online",
        group_id=f"online/{_task_of(call)}",
        run_id=run,
        step=step,
        round=round_number,
        engine=engine,
        template_hash=template_hash,
        call=model_call,
        loss_mask=[not model_call.constrained] * len(model_call.response_ids),
        truncated=model_call.finish_reason == "length",
    )
