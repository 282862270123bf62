"""What the judges of one judging share: models, kept answers, limits, and the count of what was spent."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_platform.config.home import Home
from rft_platform.judging.llm.answers import AnswerStore
from rft_platform.judging.llm.endpoint import Endpoint, EndpointSettings, open_endpoint

ANSWERS = "answers.sqlite"


@dataclass(slots=True)
class JudgeUsage:
    """What the models of one judging were asked."""

    calls: int = 0  # requests that were sent, repeated ones too
    cached: int = 0  # answers that were there already
    retries: int = 0  # requests that were repeated: no answer came, or none that says what was asked
    tokens: int = 0  # of prompts and answers, as the endpoint counts them

    def to_note(self) -> dict[str, int]:
        """The counts under the names that a round's note has; empty where no model judged."""
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
    """Where judging keeps its answers, on whose account, and what it spends."""

    folder: Path
    project: str = ""
    usage: JudgeUsage = field(default_factory=JudgeUsage)

    @classmethod
    def of(cls, home: Home, project: str = "") -> "JudgeState":
        """That of a project's home: all its answers lie in ``judging`` there."""
        return cls(home.root / "judging", project)


class JudgeSession:
    """One judging. It belongs to the event loop and the thread that it was made in."""

    def __init__(self, state: JudgeState, auxiliary_models: Mapping[str, Any], timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s  #: for a rule and one run; None: no limit beside the rule's own
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
        """The kept answers."""
        if self._answers is None:
            self._answers = AnswerStore(self._folder / ANSWERS)
        return self._answers

    def endpoint(self, model: str | EndpointSettings) -> Endpoint:
        """The model to ask; raises UserError where it is not to be had."""
        if model not in self._endpoints:
            self._endpoints[model] = open_endpoint(model, self._auxiliary_models)
        return self._endpoints[model]

    def limit(self, name: str, count: int) -> asyncio.Semaphore:
        """At most ``count`` at once of what goes by ``name``; the first count counts."""
        return self._limits.setdefault(name, asyncio.Semaphore(count))

    def one_at_a_time(self, key: str) -> asyncio.Lock:
        """So that equal questions asked at the same time are one question."""
        return self._asked.setdefault(key, asyncio.Lock())

    async def aclose(self) -> None:
        """Close what was opened here."""
        for endpoint in self._endpoints.values():
            if endpoint.owned:
                await endpoint.client.close()
        if self._answers is not None:
            self._answers.close()
