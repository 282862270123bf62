"""Run a batch on the replicas of a pool: split it by load, run the parts concurrently, repeat failed parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rft_platform.common.errors import EngineError, RftError
from rft_platform.inference.client import EngineClient
from rft_platform.inference.pool.broadcast import call_together
from rft_platform.inference.pool.replicas import Replica, Replicas

T = TypeVar("T")
R = TypeVar("R")

#: Call for one part: (client, the part's items, index of its first item in the batch) -> one answer per item.
PartCall = Callable[[EngineClient, Sequence[T], int], list[R]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Items ``start`` to ``stop`` (exclusive) of a batch, and how often this part has failed."""

    start: int
    stop: int
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A part assigned to a replica."""

    replica: Replica
    part: _Part
    cost: int  # tokens


class BatchDispatcher:
    """Dispatches batches over ``replicas``."""

    def __init__(
        self,
        replicas: Replicas,
        is_gone: Callable[[Replica, RftError], bool],
        abort: Callable[[Replica], None],
    ) -> None:
        """``is_gone``: whether an error means that a replica is lost; if so, it marks the replica down. ``abort`` ends
        the running work of a replica."""
        self._replicas = replicas
        self._is_gone = is_gone
        self._abort = abort

    def dispatch(self, items: Sequence[T], costs: Sequence[int], rows: int, call: PartCall[T, R]) -> list[R]:
        """Return one answer per item, in order. ``costs``: tokens of each item; ``rows``: sequences per item.

        A failed part is repeated on the replicas that have not refused in this call. A part runs at most as many times
        as there are replicas, because the part itself may crash replicas. After the last failure, raises the error of a
        live replica, or an EngineError that names each replica if none is live. An error that is not retryable is
        raised at once.
        """
        answers: dict[int, list[R]] = {}  # key: ``start`` of the part
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
        """Divide ``parts`` over the replicas."""
        jobs: list[_Job] = []
        try:
            for part in parts:
                for replica, share in self._replicas.partition(costs[part.start : part.stop], rows, refused):
                    piece = _Part(part.start + share.start, part.start + share.stop, part.failures)
                    jobs.append(_Job(replica, piece, share.cost))
        except EngineError as error:
            self._release(jobs)
            raise self._failed(refused, error) from None
        return jobs

    def _run(self, jobs: Sequence[_Job], items: Sequence[T], call: PartCall[T, R]) -> list[list[R] | RftError]:
        def work(job: _Job) -> Callable[[], list[R]]:
            part = job.part
            return lambda: call(job.replica.client, items[part.start : part.stop], part.start)

        try:
            return call_together([(job.replica, work(job)) for job in jobs], self._abort)
        finally:
            self._release(jobs)

    def _release(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            self._replicas.release(job.replica, job.cost)

    def _failed(self, refused: dict[Replica, EngineError], last: EngineError) -> EngineError:
        """The error to raise: the error of a live replica or, if none is live, why each replica is down."""
        if refused:
            return next(iter(refused.values()))
        return last if self._replicas.serving() else self._replicas.none_left()
