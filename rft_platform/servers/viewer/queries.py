"""Runs and rows of the experience store for the pages, by DuckDB over the Parquet files in place."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.experience.queries import connect
from rft_platform.experience.store import ExperienceStore
from rft_platform.servers.viewer.page import PAGE_ROWS

MOST_OF_TASK = 500  #: runs of a task under one policy version that a page shows
#: Largest number of rounds that one search reads: the time of a search grows with the rows.
MOST_ROUNDS = 50
_ORDERS = {
    "newest": "round DESC, run_id",
    "reward": "reward ASC NULLS FIRST, run_id",
    "-reward": "reward DESC NULLS LAST, run_id",
    "tokens": "tokens DESC, run_id",
}
_RUNS = """
WITH rewards AS (SELECT run_id, round, arg_max(reward, step) AS reward FROM judged GROUP BY run_id, round)
SELECT r.round, r.run_id, any_value(r.task_id) AS task_id, any_value(r.taskset) AS taskset,
    count(*) AS calls, sum(len(r.response_ids)) AS tokens, max(r.policy_version) AS policy_version,
    string_agg(DISTINCT r.policy, ', ') AS policy, bool_or(r.truncated) AS truncated, any_value(w.reward) AS reward,
    sum(r.duration_s) AS seconds, count(*) OVER () AS total, avg(any_value(w.reward)) OVER () AS mean_reward
FROM rollouts r LEFT JOIN rewards w ON w.run_id = r.run_id AND w.round = r.round
{where} GROUP BY r.round, r.run_id {having} ORDER BY {order} LIMIT {limit} OFFSET {offset}
"""
_PROMPTS = (
    "SELECT run_id, arg_min(messages, step) AS messages FROM rollouts WHERE list_contains(?, run_id) GROUP BY run_id"
)
_ANSWERS = """
SELECT run_id, arg_min(messages, step) AS messages, arg_max(response, (step, row_id)) AS response
FROM rollouts WHERE list_contains(?, run_id) GROUP BY run_id
"""
_VERSIONS = """
SELECT DISTINCT max(policy_version) AS version FROM rollouts WHERE task_id = ? GROUP BY round, run_id
HAVING version IS NOT NULL ORDER BY version
"""
_ROWS = """
SELECT r.*, j.reward, j.reward_parts, j.advantage, j.judge_version, j.dropped_by, j.judge_error
FROM rollouts r LEFT JOIN judged j ON j.row_id = r.row_id AND j.round = r.round
WHERE r.run_id = ? ORDER BY r.step, r.row_id
"""


@dataclass(frozen=True, slots=True)
class Search:
    """What the search form asks for; empty: everything of the newest round."""

    first: int | None = None  # rounds from here ...
    last: int | None = None  # ... to here
    text: str = ""  # in messages or answer
    task: str = ""
    taskset: str = ""
    policy: str = ""
    version: int | None = None
    least: float | None = None  # reward
    most: float | None = None
    order: str = "newest"
    page: int = 0

    def rounds(self, store: ExperienceStore) -> list[int]:
        """The rounds to read. Raises UserError if they are too many."""
        known = [number for number in store.rounds() if number]
        last = max(newest(store)[-1:], default=0) if self.last is None else self.last
        first = last if self.first is None else self.first
        chosen = [number for number in known if first <= number <= last]
        if len(chosen) > MOST_ROUNDS:
            raise UserError(f"{len(chosen)} rounds: a search reads at most {MOST_ROUNDS}; choose fewer rounds")
        return chosen


def newest(store: ExperienceStore) -> list[int]:
    """The newest rounds that have rows, as many as a search reads at most, ascending."""
    known = [number for number in store.rounds()[-MOST_ROUNDS - 2 :] if number and store.rollout_files(number)]
    return known[-MOST_ROUNDS:]


def rounds_to_compare(store: ExperienceStore, shown: Sequence[int]) -> str:
    """The rounds for the page of a task shown in some rounds; empty: the newest, which it reads anyway."""
    if not shown or set(shown) <= set(newest(store)):
        return ""
    known = [number for number in store.rounds() if 0 < number <= max(shown)][-MOST_ROUNDS:]
    return f"{known[0]}-{known[-1]}"


@dataclass(frozen=True, slots=True)
class Runs:
    """A page of runs."""

    rows: list[dict[str, Any]]
    more: bool  # whether there is a next page
    rounds: list[int]
    page: int = 0

    @property
    def total(self) -> int:
        """Number of matching runs on all pages."""
        return self.rows[0]["total"] if self.rows else 0

    @property
    def mean_reward(self) -> float | None:
        """Mean over all matching runs; None without a reward."""
        return self.rows[0]["mean_reward"] if self.rows else None


def find_runs(store: ExperienceStore, search: Search) -> Runs:
    """One page of the runs that match ``search``; a page beyond the end is the last one.

    Raises UserError if the search is not valid.
    """
    if search.order not in _ORDERS:
        raise UserError(f"order {search.order!r}: expected one of {', '.join(_ORDERS)}")
    rounds = search.rounds(store)
    where, having = _conditions(search)
    query = _RUNS.format(
        where=f"WHERE {' AND '.join(text for text, _ in where)}" if where else "",
        having=f"HAVING {' AND '.join(text for text, _ in having)}" if having else "",
        order=_ORDERS[search.order], limit=PAGE_ROWS + 1, offset=search.page * PAGE_ROWS,
    )  # fmt: skip
    values = [value for _, each in (*where, *having) for value in each]
    with connect(store, rounds=rounds) as connection:
        rows = dicts(connection.execute(query, values))
        shown = [row["run_id"] for row in rows[:PAGE_ROWS]]
        firsts = dicts(connection.execute(_PROMPTS, [shown])) if shown else []
    if search.page and not rows:
        return find_runs(store, replace(search, page=_last_page(store, replace(search, page=0))))
    prompts = {first["run_id"]: prompt_of(first["messages"]) for first in firsts}
    return Runs(
        [{**row, "prompt": prompts[row["run_id"]]} for row in rows[:PAGE_ROWS]],
        len(rows) > PAGE_ROWS,
        rounds,
        search.page,
    )


def _last_page(store: ExperienceStore, search: Search) -> int:
    """The number of the last page of the runs that match ``search``."""
    return max(find_runs(store, search).total - 1, 0) // PAGE_ROWS


def rows_of_run(store: ExperienceStore, number: int, run_id: str) -> list[dict[str, Any]]:
    """The rows of a run, in the order of its calls, with their judgement in force; messages and answers are parsed."""
    with connect(store, rounds=[number]) as connection:
        rows = dicts(connection.execute(_ROWS, [run_id]))
    for row in rows:
        for name in ("messages", "tools", "response", "run_output"):
            row[name] = None if row[name] is None else json.loads(row[name])
    return rows


def versions_of_task(store: ExperienceStore, task_id: str, rounds: Sequence[int]) -> list[int]:
    """The policy versions of a task's runs in some rounds, ascending."""
    with connect(store, rounds=rounds) as connection:
        return [version for (version,) in connection.execute(_VERSIONS, [task_id]).fetchall()]


def runs_of_task(store: ExperienceStore, task_id: str, rounds: Sequence[int], version: int) -> Runs:
    """The runs of a task under a policy version, ``MOST_OF_TASK`` at most, with the user's last message in the first
    call (``prompt``) and the last response (``answer``).
    """
    query = _RUNS.format(
        where="WHERE r.task_id = ?", having="HAVING max(r.policy_version) = ?", order="r.round, run_id",
        limit=MOST_OF_TASK + 1, offset=0,
    )  # fmt: skip
    with connect(store, rounds=rounds) as connection:
        rows = dicts(connection.execute(query, [task_id, version]))
        shown = rows[:MOST_OF_TASK]
        texts = dicts(connection.execute(_ANSWERS, [[row["run_id"] for row in shown]])) if shown else []
    read = {
        each["run_id"]: {"prompt": prompt_of(each["messages"]), "answer": json.loads(each["response"])}
        for each in texts
    }
    return Runs([{**row, **read[row["run_id"]]} for row in shown], len(rows) > len(shown), list(rounds))


def _conditions(search: Search) -> tuple[list[tuple[str, list[Any]]], list[tuple[str, list[Any]]]]:
    """Conditions on rows and on runs, each with the values of its parameters."""
    where: list[tuple[str, list[Any]]] = []
    if search.text:
        forms = _stored_forms(search.text)
        found = " OR ".join(["contains(lower(messages), ?) OR contains(lower(response), ?)"] * len(forms))
        values = [form for form in forms for _ in range(2)]
        where.append((f"r.run_id IN (SELECT run_id FROM rollouts WHERE {found})", values))
    for column, value in (("task_id", search.task), ("taskset", search.taskset), ("policy", search.policy)):
        if value:
            where.append((f"r.{column} = ?", [value]))
    if search.version is not None:
        where.append(("r.policy_version = ?", [search.version]))
    having: list[tuple[str, list[Any]]] = []
    if search.least is not None:
        having.append(("any_value(w.reward) >= ?", [search.least]))
    if search.most is not None:
        having.append(("any_value(w.reward) <= ?", [search.most]))
    return where, having


def _stored_forms(text: str) -> list[str]:
    """The text as rows have it: in a JSON string, and in the arguments of a tool call, which are JSON in a string."""
    once = json.dumps(text, ensure_ascii=False)[1:-1].lower()
    twice = json.dumps(once, ensure_ascii=False)[1:-1]
    return list(dict.fromkeys([once, twice]))


def prompt_of(messages: str) -> str:
    """The text of the user's last message, or of the last one if no user wrote, in a row's messages (JSON)."""
    found = json.loads(messages)
    users = [message for message in found if message.get("role") == "user"]
    content = (users or found or [{}])[-1].get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(str(part["text"]) for part in content if part.get("text"))


def dicts(cursor: Any) -> list[dict[str, Any]]:
    """The rows of a query by column name."""
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
