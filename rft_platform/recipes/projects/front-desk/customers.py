"""Simulated customers: they ask, rate the answers late and noisily, comment, and commit their ratings."""

import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

import httpx
import openai

from questions import ask

_COMMIT_S = 1.0
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Habits:
    """How customers behave."""

    customers: int = 4
    pause_s: float = 0.1  # between an answer and the next question
    longest_delay_s: float = 1.0  # between an answer and its rating
    wrong_rate: float = 0.05  # share of ratings that say the opposite
    silent_rate: float = 0.1  # share of answers that nobody rates
    comment_rate: float = 0.05
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """The answers that the customers received, counted."""

    right: defaultdict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))  # by policy version
    failures: list[str] = field(default_factory=list)  # requests that did not succeed
    rated: list[str] = field(default_factory=list)  # ids of the answers whose rating was acknowledged

    @property
    def requests(self) -> int:
        """Chat requests that were answered."""
        return sum(map(len, self.right.values()))

    def rate(self, version: int) -> float:
        """Share of right answers among the answers of a policy version."""
        answers = self.right[version]
        return sum(answers) / len(answers) if answers else 0.0


class Customers:
    """Threads that talk to the service at ``url`` until ``stop``."""

    def __init__(self, url: str, habits: Habits) -> None:
        self.tally = Tally()
        self._url = url
        self._habits = habits
        self._ended = threading.Event()
        works = [lambda number=number: self._talk(number) for number in range(habits.customers)]
        self._threads = [threading.Thread(target=work, daemon=True) for work in (*works, self._commit)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all conversations and the ratings that are still due."""
        self._ended.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)

    def _talk(self, number: int) -> None:
        generator = random.Random(f"{self._habits.seed}/{number}")
        due: list[tuple[float, str, float]] = []  # time, message, reward
        with (
            httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as http,
            openai.OpenAI(
                base_url=f"{self._url}/v1",
                api_key="none",
                http_client=openai.DefaultHttpxClient(trust_env=False, timeout=_TIMEOUT_S),
                max_retries=0,
            ) as client,
        ):
            while not self._ended.is_set():
                try:
                    self._ask(client, generator, number, due)
                    ready = [rating for rating in due if rating[0] <= time.monotonic()]
                    due = [rating for rating in due if rating not in ready]
                    for _, message, reward in ready:
                        self._rate(http, generator, message, reward)
                except Exception as error:
                    self.tally.failures.append(repr(error))
                    self._ended.wait(1.0)
                self._ended.wait(self._habits.pause_s)

    def _ask(
        self, client: openai.OpenAI, generator: random.Random, number: int, due: list[tuple[float, str, float]]
    ) -> None:
        question, department = ask(generator)
        raw = client.chat.completions.with_raw_response.create(
            model="front-desk", messages=[{"role": "user", "content": question}], user=f"customer-{number}"
        )
        answer = raw.parse()
        right = (answer.choices[0].message.content or "").strip() == department
        self.tally.right[int(raw.headers["x-policy-version"])].append(right)
        if generator.random() >= self._habits.silent_rate:
            liked = right != (generator.random() < self._habits.wrong_rate)
            delay = generator.uniform(0.0, self._habits.longest_delay_s)
            due.append((time.monotonic() + delay, answer.id, float(liked)))

    def _rate(self, http: httpx.Client, generator: random.Random, message: str, reward: float) -> None:
        body: dict[str, object] = {"msg_ids": [message], "reward": reward}
        if generator.random() < self._habits.comment_rate:
            body["comment"] = "thank you" if reward else "that was the wrong department"
        http.post(f"{self._url}/feedback", json=body).raise_for_status()
        self.tally.rated.append(message)

    def _commit(self) -> None:
        with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as http:
            while not self._ended.wait(_COMMIT_S):
                try:
                    http.post(f"{self._url}/commit").raise_for_status()
                except httpx.HTTPError as error:
                    self.tally.failures.append(repr(error))
