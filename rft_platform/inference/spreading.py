"""A batch over the replicas of a pool: split by load, worked on at the same time, repeated where a part fails."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rft_platform.errors import EngineError, RftError
from rft_platform.inference.client import EngineClient
from rft_platform.inference.fan_out import call_together
from rft_platform.inference.replicas import Replica, Replicas

T = TypeVar("T")
R = TypeVar("R")

#: What is done with a part: client, the part's items, number of its first item in the batch -> an answer an item.
PartCall = Callable[[EngineClient, Sequence[T], int], list[R]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Items ``start`` to ``stop`` (exclusive) of a batch, and how often they have failed."""

    start: int
    stop: int
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A part in the hands of a replica."""

    replica: Replica
    part: _Part
    cost: int  # tokens


class Spreader:
    """Spreads batches over ``replicas``."""

    def __init__(
        self,
        replicas: Replicas,
        is_gone: Callable[[Replica, RftError], bool],
        abort: Callable[[Replica], None],
    ) -> None:
        """``is_gone`` says whether an error means that a replica is down (and marks it so); ``abort`` ends its work."""
        self._replicas = replicas
        self._is_gone = is_gone
        self._abort = abort

    def spread(self, items: Sequence[T], costs: Sequence[int], rows: int, call: PartCall[T, R]) -> list[R]:
        """One answer an item, in order; ``costs`` are the items' tokens, ``rows`` the sequences that each stands for.

        A part that fails is split over the replicas that have not refused in this call, and no more often than there
        are replicas: it may be what brings them down. Raises what a replica that is alive said, else EngineError
        naming each; an error that no other replica could mend at once.
        """
        answers: dict[int, list[R]] = {}  # by the start of their part
        refused: dict[Replica, EngineError] = {}
        open_parts = [_Part(0, len(items))] if items else []
        while open_parts:
            jobs = self._jobs(open_parts, costs, rows, refused)
            open_parts = []
            for job, outcome in zip(jobs, self._run(jobs, items, call), strict=True):
                if not isinstance(outcome, RftError):
                    answers[job.part.start] = outcome
                    continue
                if not isinstance(outcome, EngineError) or not outcome.retryable:
                    raise outcome
                if not self._is_gone(job.replica, outcome):
                    refused[job.replica] = outcome
                if job.part.failures + 1 >= self._replicas.count:
                    raise self._failed(refused, outcome)
                open_parts.append(replace(job.part, failures=job.part.failures + 1))
        return [answer for start in sorted(answers) for answer in answers[start]]

    def _jobs(
        self, parts: Sequence[_Part], costs: Sequence[int], rows: int, refused: dict[Replica, EngineError]
    ) -> list[_Job]:
        """Who works on which piece of ``parts``."""
        jobs: list[_Job] = []
        try:
            for part in parts:
                for replica, share in self._replicas.divide(costs[part.start : part.stop], rows, refused):
                    piece = _Part(part.start + share.start, part.start + share.stop, part.failures)
                    jobs.append(_Job(replica, piece, share.cost))
        except EngineError as error:
            self._give_back(jobs)
            raise self._failed(refused, error) from None
        return jobs

    def _run(self, jobs: Sequence[_Job], items: Sequence[T], call: PartCall[T, R]) -> list[list[R] | RftError]:
        def work(job: _Job) -> Callable[[], list[R]]:
            part = job.part
            return lambda: call(job.replica.client, items[part.start : part.stop], part.start)

        try:
            return call_together([(job.replica, work(job)) for job in jobs], self._abort)
        finally:
            self._give_back(jobs)

    def _give_back(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            self._replicas.give_back(job.replica, job.cost)

    def _failed(self, refused: dict[Replica, EngineError], last: EngineError) -> EngineError:
        """What they all have to say: the words of one that is alive, else of each why it is down."""
        if refused:
            return next(iter(refused.values()))
        return last if self._replicas.serving() else self._replicas.none_left()
