"""What all judges of one judge pass share: models, stored answers, limits, and usage counts.

A judge model is an auxiliary model of the project by its name, or any OpenAI endpoint. ``AnswerStore`` keeps the
answers of judge models by request, and what each project has spent: one SQLite file for all processes.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import UserError
from rft_platform.common.redaction import hide
from rft_platform.config.home import Home
from rft_platform.judging.inert_text import control_tokens

if TYPE_CHECKING:
    import openai

JUDGE = "the judge's model"  #: role of a model that judges, in messages


class EndpointSettings(BaseModel):
    """An OpenAI endpoint in the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    model: str
    api_key_env: str | None = None
    """The environment variable with the key; null: no key needed."""

    def api_key(self, role: str = JUDGE) -> str:
        """Return the key, or a placeholder if none is needed.

        Raises UserError if the variable is not set; ``role`` says there what the model is for.
        """
        key = "EMPTY" if self.api_key_env is None else os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise UserError(
                f"{role} {self.model!r}: the environment variable {self.api_key_env} is not set; export the key of "
                f"{self.base_url} in it"
            )
        if self.api_key_env is not None:
            hide(key)
        return key


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer and the tokens that it used."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model to ask."""

    identity: str  # part of the key of stored answers: model, address and default parameters
    model: str
    client: "openai.AsyncOpenAI"
    owned: bool  # whether the judge context closes the client

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Control tokens of the model's chat template, if its tokenizer is on this machine."""
        return control_tokens(self.model)

    async def ask(self, messages: list[dict[str, str]], params: Mapping[str, Any], timeout_s: float) -> Reply:
        """Make one attempt; raises what ``openai`` raises."""
        create: Any = self.client.chat.completions.create
        answer = await create(model=self.model, messages=messages, timeout=timeout_s, **params)
        usage = answer.usage
        text = answer.choices[0].message.content if answer.choices else None
        return Reply(text or "", 0 if usage is None else usage.total_tokens)


def open_endpoint(model: str | EndpointSettings, auxiliary_models: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint that ``model`` names. Raises UserError for an unknown name or a missing key.

    An auxiliary model is any object with ``model_name`` and an ``openai.AsyncOpenAI``, such as ``AuxiliaryModel`` or a
    chat model of AgentScope.
    """
    if isinstance(model, EndpointSettings):
        return _own(model)
    if model not in auxiliary_models:
        raise UserError(
            f"{JUDGE} {model!r} is not an auxiliary model; explorer.auxiliary_models has "
            f"{sorted(auxiliary_models) or 'none'}: add it there, or give model as {{base_url, model, api_key_env}}"
        )
    found = auxiliary_models[model]
    client = found.get_openai_async_client() if hasattr(found, "get_openai_async_client") else found.client
    identity = getattr(found, "identity", None) or f"{found.model_name} at {client.base_url}"
    return Endpoint(identity, found.model_name, client.with_options(max_retries=0), owned=False)


def _own(settings: EndpointSettings) -> Endpoint:
    import openai

    client = openai.AsyncOpenAI(base_url=settings.base_url, api_key=settings.api_key(), max_retries=0)
    return Endpoint(f"{settings.model} at {settings.base_url}", settings.model, client, owned=True)


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


ANSWERS = "answers.sqlite"


@dataclass(slots=True)
class JudgeUsage:
    """Counts of requests to models in one judge pass."""

    calls: int = 0  # requests sent, retries included
    cached: int = 0  # answers taken from the store
    retries: int = 0  # requests repeated because the answer was missing or invalid
    tokens: int = 0  # tokens of prompts and answers, as the endpoint counts them

    def to_note(self) -> dict[str, int]:
        """The counts, with the names that a round's note uses; empty if no model judged."""
        if not (self.calls or self.cached):
            return {}
        return {
            "judge_calls": self.calls,
            "judge_cached": self.cached,
            "judge_retries": self.retries,
            "judge_tokens": self.tokens,
        }


@dataclass(frozen=True, slots=True)
class JudgeState:
    """Where judging stores its answers, for which project, and its usage counts."""

    folder: Path
    project: str = ""
    usage: JudgeUsage = field(default_factory=JudgeUsage)

    @classmethod
    def of(cls, home: Home, project: str = "") -> "JudgeState":
        """Return the state of a project's home: its answers are stored in ``judging`` there."""
        return cls(home.root / "judging", project)


class JudgeContext:
    """One judge pass. Use it only in the event loop and the thread in which it was created."""

    def __init__(self, state: JudgeState, auxiliary_models: Mapping[str, Any], timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s  #: time limit of a rule for one run; None: only the rule's own limit
        self.project = state.project
        self.usage = state.usage
        self._folder = state.folder
        self._auxiliary_models = auxiliary_models
        self._answers: AnswerStore | None = None
        self._endpoints: dict[str | EndpointSettings, Endpoint] = {}
        self._limits: dict[str, asyncio.Semaphore] = {}
        self._asked: dict[str, asyncio.Lock] = {}

    @property
    def answers(self) -> AnswerStore:
        """The store of answers, opened at first use."""
        if self._answers is None:
            self._answers = AnswerStore(self._folder / ANSWERS)
        return self._answers

    def endpoint(self, model: str | EndpointSettings) -> Endpoint:
        """Return the model to ask. Raises UserError if it is not available."""
        if model not in self._endpoints:
            self._endpoints[model] = open_endpoint(model, self._auxiliary_models)
        return self._endpoints[model]

    def limit(self, name: str, count: int) -> asyncio.Semaphore:
        """Semaphore called ``name`` for ``count`` concurrent uses; the ``count`` of the first call applies."""
        return self._limits.setdefault(name, asyncio.Semaphore(count))

    def one_at_a_time(self, key: str) -> asyncio.Lock:
        """Lock for one question. Equal concurrent questions wait for the first one, and then use its stored answer."""
        return self._asked.setdefault(key, asyncio.Lock())

    async def aclose(self) -> None:
        """Close the clients and the store that this object opened."""
        for endpoint in self._endpoints.values():
            if endpoint.owned:
                await endpoint.client.close()
        if self._answers is not None:
            self._answers.close()
