"""Store of judge models' answers by request, and of each project's spending: one SQLite file for all processes."""

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import UserError

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, model TEXT NOT NULL, answer TEXT NOT NULL, created_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (
    project TEXT PRIMARY KEY, calls INTEGER NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
"""
_WAIT_S = 60.0  # seconds to wait for another process's lock


@dataclass(frozen=True, slots=True)
class Spent:
    """Calls and tokens that judging has used so far."""

    calls: int
    tokens: int


class BudgetSpentError(UserError):
    """A judge's budget is used up: no model is called and nothing is judged until the user raises the budget."""

    hint = (
        "raise the judge's budget, then launch the job again; answers that were received are "
        "kept and not requested again"
    )


class AnswerStore:
    """Connection to the SQLite file, for use in one thread."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with locked(file):  # the switch to WAL needs a lock, and SQLite's time-out does not apply to this lock
            self._connection = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.executescript(_TABLES)
        self._connection.execute("PRAGMA synchronous=NORMAL")  # after a power failure the last answers may be lost

    def find(self, key: str) -> str | None:
        """Return the answer stored under ``key``, or None."""
        row = self._connection.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: str, model: str, answer: str) -> None:
        """Store an answer; it replaces an earlier answer with the same key."""
        row = (key, model, answer, time.time())
        self._connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", row)

    def spent(self, project: str) -> Spent:
        """Calls and tokens that ``project`` has used."""
        row = self._connection.execute("SELECT calls, tokens FROM spent WHERE project = ?", (project,)).fetchone()
        return Spent(0, 0) if row is None else Spent(*map(int, row))

    def reserve_call(self, project: str, most_calls: int | None, most_tokens: int | None) -> None:
        """Count a call before it is made, atomically over all processes.

        Raises BudgetSpentError if the project has no calls or no tokens left.
        """
        self._connection.execute("INSERT OR IGNORE INTO spent (project) VALUES (?)", (project,))
        counted = self._connection.execute(
            "UPDATE spent SET calls = calls + 1 WHERE project = ?1 AND (?2 IS NULL OR calls < ?2) "
            "AND (?3 IS NULL OR tokens < ?3)",
            (project, most_calls, most_tokens),
        ).rowcount
        if not counted:
            spent = self.spent(project)
            what = "project_calls" if most_calls is not None and spent.calls >= most_calls else "project_tokens"
            allowed = most_calls if what == "project_calls" else most_tokens
            raise BudgetSpentError(
                f"the judge's budget is used up: project {project!r} has made {spent.calls:,} calls with "
                f"{spent.tokens:,} tokens, budget.{what} allows {allowed:,}; raise it and judge again"
            )

    def count_tokens(self, project: str, tokens: int) -> None:
        """Add the tokens of an answer to those that ``project`` has used."""
        self._connection.execute("UPDATE spent SET tokens = tokens + ? WHERE project = ?", (tokens, project))

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
