"""What must hold after the kills: acknowledged feedback is there, no row is used twice, no group is split."""

import sqlite3
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos.online.customers import Diary
from rft_platform.rounds.project.project import Project

ENGINE_GONE_S = 30.0  # longest time from the kill of an engine to the end of a stream that it answered


@dataclass
class Found:
    """Numbers of the campaign, and what was violated."""

    acknowledged: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    collected_rows: int = 0
    violations: list[str] = field(default_factory=list)
    streams_without_engine: int = 0  # streams that ended with the event engine_unavailable

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


def unexplained(diary: Diary) -> int:
    """Number of streams that lost their engine although no engine had been killed shortly before.

    A stream cannot continue without its engine, but only a kill may end an engine.
    """
    return sum(not any(0 <= at - kill <= ENGINE_GONE_S for kill in diary.engine_kills) for at in diary.engine_gone)


def check(project: Project, database: Path, diary: Diary) -> Found:
    """Compare the database, the rounds' files and the customers' diary."""
    found = Found(acknowledged=len(diary.acknowledged), streams_without_engine=len(diary.engine_gone))
    found.violations += [f"a chat failed: {each}" for each in diary.failed] + diary.wrong
    found.violations += ["a stream ended with engine_unavailable without a kill of the engine"] * unexplained(diary)
    with closing(sqlite3.connect(database)) as connection:
        if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            found.violations.append("the database is damaged")
        calls = connection.execute("SELECT number, msg_id, choice, state, reward, task_id, batch FROM calls").fetchall()
        kept = {
            name: (msg_id, value)
            for name, msg_id, value in connection.execute(
                "SELECT feedback_id, msg_id, value FROM feedback JOIN feedback_calls USING (feedback_id) "
                "JOIN calls USING (number)"
            )
        }
    found.rows = dict(Counter(state for _, _, _, state, *_ in calls))
    lost = {name for name, given in diary.acknowledged.items() if kept.get(name) != given}
    found.violations += [f"the acknowledged feedback {name} is lost: {kept.get(name)}" for name in sorted(lost)[:20]]
    _check_rounds(project, calls, found)
    return found


def _check_rounds(project: Project, calls: list[Any], found: Found) -> None:
    consumed = {msg_id: (batch, reward) for _, msg_id, _, state, reward, _, batch in calls if state == "consumed"}
    rows = [row for number in project.store.rounds() if number for row in project.store.rollout_rows(number)]
    found.rounds, found.collected_rows = len({row.round for row in rows}), len(rows)
    twice = [msg_id for msg_id, times in Counter(row.call.msg_id for row in rows).items() if times > 1]
    found.violations += [f"the row {msg_id} is in two rounds" for msg_id in twice[:20]]
    stored = {row.call.msg_id: (row.round, row.run_reward) for row in rows}
    for msg_id in sorted(stored.keys() ^ consumed.keys())[:20]:
        found.violations.append(f"the row {msg_id}: files {stored.get(msg_id)}, database {consumed.get(msg_id)}")
    for msg_id in sorted(stored.keys() & consumed.keys()):
        if stored[msg_id] != consumed[msg_id]:
            found.violations.append(f"the row {msg_id}: files {stored[msg_id]}, database {consumed[msg_id]}")
    groups: defaultdict[str, set[int]] = defaultdict(set)
    sizes = Counter(row.group_id for row in rows)
    for row in rows:
        groups[row.group_id].add(row.round)
    split = [name for name, rounds in groups.items() if len(rounds) > 1 or sizes[name] != 2]
    found.violations += [f"the group {name} is split: rounds {sorted(groups[name])}" for name in split[:20]]
