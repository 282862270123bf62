"""Scheduling of the engine: one thread owns the model and runs all requests, updates and pauses from queues."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rft_platform.common.errors import EngineError
from rft_platform.inference.interface import PauseMode
from rft_platform.inference.transformers_engine.generator import Generator
from rft_platform.inference.transformers_engine.request import Request

T = TypeVar("T")
IDLE_S = 10.0  # time without work after which the generator releases its memory
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """Identity of the weights being served."""

    policy_version: int
    weights_digest: str
    folder: Path


class Scheduler:
    """Continuous batching: a new request joins the active rows at the next token.

    A request is sampled on one version of the weights: ``update`` holds back requests that have not started, waits for
    started requests, changes weights and version, and then serves again.
    """

    def __init__(self, generator: Generator, served: Served, max_rows: int, max_batch_tokens: int) -> None:
        self.generator = generator
        self.served = served
        self.max_rows = max_rows
        self.max_batch_tokens = max_batch_tokens
        self.generate_seconds = 0.0
        self._wake = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._held: deque[Request] = deque()  # received during a pause
        self._calls: deque[Callable[[], None]] = deque()  # run between two steps
        self._updates: deque[Callable[[], None]] = deque()  # run when no started request is unfinished
        self._drained: list[Future[None]] = []  # resolved when no request is waiting or running
        self._paused = self._frozen = self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def paused(self) -> bool:
        """Whether new requests are held."""
        return self._paused

    @property
    def busy(self) -> bool:
        """Whether any work is queued or running."""
        return bool(self._waiting or self._held or self._calls or self._updates or self.generator.rows)

    def submit(self, request: Request) -> None:
        """Queue ``request``; its future gets the result."""
        request.future.set_running_or_notify_cancel()  # the caller can no longer cancel the future
        with self._wake:
            if self._closed:
                request.fail(EngineError("the engine is shutting down"))
            elif self._paused:
                self._held.append(request)
            else:
                self._waiting.append(request)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """Cancel ``request``, whose caller has disconnected. Prompts not yet forwarded are skipped."""
        request.abandoned = True

        def end() -> None:
            self._abort(lambda other: other is request)
            request.abort()  # for a request that has left the queue although some of its rows never started

        self.call(end)

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run ``function`` in the engine's thread, between two tokens."""
        return self._enqueue(self._calls, function)

    def update(self, change: Callable[[], Served]) -> "Future[Served]":
        """Run ``change`` when no started request is unfinished; its result becomes ``served``.

        If ``change`` raises, the previous weights stay in service.
        """

        def run() -> Served:
            self.served = change()
            return self.served

        return self._enqueue(self._updates, run)

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Hold new requests. The future is done when the others are frozen (keep), ended (abort) or finished (wait)."""
        with self._wake:
            self._paused, self._frozen = True, mode == "keep"
        if mode == "keep":
            return self.call(lambda: None)
        if mode == "abort":
            return self.call(lambda: self._abort(lambda _: True))
        drained: Future[None] = Future()
        with self._wake:
            self._drained.append(drained)
            self._wake.notify()
        return drained

    def resume(self) -> None:
        """Serve again, starting with the held requests."""
        with self._wake:
            self._paused = self._frozen = False
            self._waiting.extend(self._held)
            self._held.clear()
            self._release_drained()
            self._wake.notify()

    def close(self) -> None:
        """End the thread after the current step; unfinished requests fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _enqueue(self, queue: "deque[Callable[[], None]]", function: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            if self._closed:
                raise EngineError("the engine is shutting down")
            queue.append(run)
            self._wake.notify()
        return future

    def _run(self) -> None:
        while True:
            self._wait_for_work()
            if self._closed:
                break
            try:
                self._turn()
            except Exception as error:  # for instance out of memory: the active requests fail, the engine continues
                LOG.exception("a step failed")
                self.generator.fail(error)
        ended = EngineError("the engine shut down before it answered")
        self.generator.fail(ended)
        for request in [*self._waiting, *self._held]:
            request.fail(ended)
        for left in [*self._calls, *self._updates]:
            left()
        with self._wake:
            self._release_drained()

    def _wait_for_work(self) -> None:
        with self._wake:
            if self._wake.wait_for(self._awake, IDLE_S):
                return
        self.generator.release_memory()
        with self._wake:
            self._wake.wait_for(self._awake)

    def _awake(self) -> bool:
        return self._closed or self._runnable()

    def _runnable(self) -> bool:
        if self._calls or self._updates:
            return True
        work = bool(self._waiting or self.generator.rows)
        return (work and not self._frozen) or (bool(self._drained) and not work)

    def _turn(self) -> None:
        """Run queued calls and updates, admit requests, then sample one token per row."""
        while self._calls:
            self._calls.popleft()()
        while self._updates and not self._under_way():
            self._updates.popleft()()
        if not self._frozen or self._updates:
            begin = time.perf_counter()
            self._admit()
            if self.generator.rows:
                self.generator.step()
            self._end_early()
            self.generate_seconds += time.perf_counter() - begin
        with self._wake:
            if not self._waiting and not self.generator.rows:
                self._release_drained()

    def _end_early(self) -> None:
        """End the requests whose callers want no further tokens."""
        for request in {row.request for row in self.generator.rows if row.request.partial is not None}:
            if request.ends_early:
                self._abort(request.__eq__)
                request.abort()  # rows that never started

    def _release_drained(self) -> None:
        """Let the callers of ``pause("wait")`` continue: no request is running, or the pause has ended."""
        while self._drained:
            self._drained.pop().set_result(None)

    def _under_way(self) -> bool:
        """Whether a started request is unfinished."""
        return bool(self.generator.rows) or any(request.started for request in self._waiting)

    def _admit(self) -> None:
        """Start rows of waiting requests, in order, as far as they fit; start no new request while an update waits."""
        for request in list(self._waiting):
            if self._updates and not request.started:
                continue
            count = 0 if request.over else self._fitting(request)
            if count:
                request.policy_version = self.served.policy_version
                try:
                    self.generator.admit(request, count)
                except Exception as error:
                    request.fail(error)
                    raise
            if request.admitted < request.rows and not request.over:
                if request.admitted < request.admissible:
                    return
                continue
            with self._wake:
                self._waiting.remove(request)

    def _fitting(self, request: Request) -> int:
        """Number of further rows of ``request`` that fit beside the active rows; at least one if no row is active.

        The cache is a rectangle, so ``max_batch_tokens`` bounds the number of rows times the longest row.
        """
        active, longest = len(self.generator.rows), self.generator.longest
        count = 0
        for row in range(request.admitted, request.admissible):
            longest = max(longest, request.length_of(row))
            full = active + count + 1 > self.max_rows or (active + count + 1) * longest > self.max_batch_tokens
            if full and active + count > 0:
                break
            count += 1
        return count

    def _abort(self, chosen: Callable[[Request], bool]) -> None:
        self.generator.abort(chosen)
        with self._wake:
            for queue in (self._waiting, self._held):
                for request in [each for each in queue if chosen(each)]:
                    queue.remove(request)
                    request.abort()
