"""The one thread of the service that writes to the database, so that a slow database never delays a chat request.

Invariants:

- Writes happen in the order in which they were queued: a feedback that arrives right after an answer finds its call.
- A group of calls is one transaction; calls leave the queue only after they are written.
- A call that the database refuses is dropped and counted alone; the others of its group are written.
- The queue is bounded: a call beyond the limit is dropped and counted, and no request waits for room.
- A request whose caller has stopped waiting is not executed later, unless it has already begun.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError

from rft_platform.online.traffic.database import DatabaseUnavailableError, answering, cause, is_unavailable
from rft_platform.online.traffic.incoming import NewCall
from rft_platform.online.traffic.store import TrafficStore

LOG = logging.getLogger(__name__)
T = TypeVar("T")

#: For ``sys.setswitchinterval``. SQLite releases the interpreter lock at every row, and a busy event loop
#: holds it for one interval: with Python's 5 ms the queue grew at 2,000 requests/s until calls were dropped.
SWITCH_INTERVAL_S = 0.0005

_GROUP = 256  # calls in one transaction
_LINGER_S = 0.02  # a group waits this long for further calls, unless a request is queued behind the group
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0


@dataclass(slots=True)
class WriterCounts:
    """What the writer did since it started."""

    recorded: int = 0
    dropped: int = 0  # calls that were not recorded: the queue was full, or the database refused them
    failures: int = 0  # transactions that failed and were repeated


@dataclass(frozen=True, slots=True)
class _Request:
    """A write to the store, and the future for its result."""

    work: Callable[[TrafficStore], Any]
    done: Future[Any]


class TrafficWriter:
    """Writes to the traffic store in the order in which its methods are called; any thread may call them."""

    def __init__(self, store: TrafficStore, most_waiting: int = 10_000) -> None:
        """At most ``most_waiting`` calls wait to be written; further calls are dropped and counted."""
        self.counts = WriterCounts()
        self.store = store  # other threads may read it
        self._most_waiting = most_waiting
        self._queue: deque[NewCall | _Request] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="traffic-writer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of calls and requests that wait."""
        return len(self._queue)

    def record(self, call: NewCall) -> bool:
        """Queue a call; False if the queue is full and the call is dropped."""
        with self._changed:
            if self._closing or len(self._queue) >= self._most_waiting:
                self.counts.dropped += 1
                if self.counts.dropped == 1 or self.counts.dropped % 1000 == 0:
                    LOG.warning(
                        "%d calls were not recorded: %d wait for the database, which is the limit",
                        self.counts.dropped, len(self._queue),
                    )  # fmt: skip
                return False
            self._queue.append(call)
            if len(self._queue) in (1, _GROUP):  # else the writer is busy, or waits until a group is complete
                self._changed.notify()
            return True

    async def run(self, work: Callable[[TrafficStore], T], timeout_s: float = 30.0) -> T:
        """Call ``work`` after everything that was queued before it; returns its result or raises its error.

        Raises DatabaseUnavailableError if the database does not answer within ``timeout_s``. ``work`` is then not
        called later, unless it has already begun.
        """
        done: Future[T] = Future()
        request = _Request(work, done)
        with self._changed:
            if self._closing:
                raise DatabaseUnavailableError("the service is stopping: send the request again to the next one")
            self._queue.append(request)
            self._changed.notify()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), timeout_s)
        except TimeoutError:
            raise DatabaseUnavailableError(
                f"the database did not answer within {timeout_s:g} s: send the request again"
            ) from None
        finally:
            self._withdraw(request)

    def _withdraw(self, request: _Request) -> None:
        """Remove from the queue a request whose caller has stopped waiting."""
        with self._changed:
            if request.done.cancel() and request in self._queue:
                self._queue.remove(request)

    def close(self, timeout_s: float = 30.0) -> int:
        """Write the queue, then stop; returns the number of calls that could not be written within ``timeout_s``."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return sum(isinstance(each, NewCall) for each in self._queue) if self._thread.is_alive() else 0

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                self._changed.wait_for(self._is_urgent, _LINGER_S)
                calls = self._next_calls()
                request = None if calls else self._queue.popleft()
            if calls:
                self._write(calls)
            elif isinstance(request, _Request):
                self._answer(request)

    def _is_urgent(self) -> bool:
        """Whether a request waits in the queue, or a group is complete."""
        complete = self._closing or len(self._queue) >= _GROUP
        return complete or any(isinstance(each, _Request) for each in self._queue)

    def _next_calls(self) -> list[NewCall]:
        """The calls at the head of the queue; they leave the queue only after they are written."""
        calls: list[NewCall] = []
        for each in self._queue:
            if not isinstance(each, NewCall) or len(calls) == _GROUP:
                break
            calls.append(each)
        return calls

    def _write(self, calls: list[NewCall]) -> None:
        """Write the calls at the head of the queue; drop a call that cannot be written, and write the others."""
        rows = []  # redacted only once, also if the transaction is repeated
        for call in calls:
            try:
                rows.append(self.store.prepare(call))
            except Exception as error:
                self._drop(call.msg_id, f"its text cannot be redacted: {error}")
        self._insert(rows)

    def _insert(self, rows: list[dict[str, Any]]) -> bool:
        """Insert rows. If the database refuses one of them, insert them one by one and drop only the refused row.

        Returns False if the service stops while the database does not work.
        """
        try:
            if not self._repeat_insert(rows):
                self._give_up()
                return False
        except Exception as error:
            if len(rows) > 1:
                return all(self._insert([row]) for row in rows)
            self._drop(rows[0]["msg_id"], f"the database refuses it: {cause(error)}")
            return True
        self.counts.recorded += len(rows)
        self._leave_queue(len(rows))
        return True

    def _drop(self, msg_id: str, why: str) -> None:
        self.counts.dropped += 1
        LOG.error("the call %s is dropped, %s", msg_id, why)
        self._leave_queue(1)

    def _leave_queue(self, calls: int) -> None:
        """Remove ``calls`` written or dropped calls from the head of the queue; the calls of a group leave together."""
        with self._changed:
            for _ in range(calls):
                self._queue.popleft()

    def _repeat_insert(self, rows: list[dict[str, Any]]) -> bool:
        """Insert rows in one transaction, which is repeated while the database does not work.

        Returns False if the service stops first.
        """
        wait = _FIRST_RETRY_S
        while True:
            try:
                self.store.insert(rows)
                return True
            except DBAPIError as error:
                if not is_unavailable(error):
                    raise
                self.counts.failures += 1
                LOG.warning(
                    "%d calls cannot be written to the database, repeated in %.1f s: %s",
                    len(rows), wait, cause(error),
                )  # fmt: skip
                if self._closing:
                    return False
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_RETRY_S)

    def _give_up(self) -> None:
        """Drop the queue: the service stops and the database does not work."""
        with self._changed:
            lost = sum(isinstance(each, NewCall) for each in self._queue)
            requests = [each for each in self._queue if isinstance(each, _Request)]
            self._queue.clear()
        self.counts.dropped += lost
        LOG.error("%d calls are lost: the service stops and its database cannot be written", lost)
        for request in requests:
            if request.done.set_running_or_notify_cancel():
                request.done.set_exception(
                    DatabaseUnavailableError("the service stops and its database cannot be written")
                )

    def _answer(self, request: _Request) -> None:
        if not request.done.set_running_or_notify_cancel():
            return
        try:
            with answering():
                result = request.work(self.store)
            request.done.set_result(result)
        except BaseException as error:
            request.done.set_exception(error)
