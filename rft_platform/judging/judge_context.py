"""State that all judges of one judging share: models, stored answers, limits, and usage counts."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_platform.config.home import Home
from rft_platform.judging.answer_store import AnswerStore
from rft_platform.judging.model_endpoint import Endpoint, EndpointSettings, open_endpoint

ANSWERS = "answers.sqlite"


@dataclass(slots=True)
class JudgeUsage:
    """Counts of requests to models in one judging (one call that judges many runs)."""

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
    """One judging. Use it only in the event loop and the thread in which it was created."""

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
