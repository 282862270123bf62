"""The heartbeat of the home that drives a project: ``driver.json`` on the object store.

It refuses a second driver early. It is not the fence: a home that took over while the other one was only slow has
the next commit, and the other one stops there.
"""

import itertools
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rft_platform.common.errors import TransientError, UserError
from rft_platform.object_store.remote_files import RemoteFiles

LOG = logging.getLogger(__name__)
_NAME = "driver.json"
_BEAT_S = 5.0


class DriverHeartbeat:
    """The heartbeat of this home, and that of other homes.

    ``home`` gives the id of this home now, ``holds_project`` says whether no other home has continued the project.
    ``remote`` gives the store; the heartbeat's thread calls it first, because a client of S3 takes a second to import.
    """

    def __init__(
        self, remote: Callable[[], RemoteFiles], home: Callable[[], str], holds_project: Callable[[], bool]
    ) -> None:
        self._remote = remote
        self._home, self._holds_project = home, holds_project
        self._until = 0.0  # end of the heartbeat, monotonic
        self._ended, self._starting = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Write heartbeats during the block."""
        self.beat_for(math.inf)
        try:
            yield
        finally:
            self._ended.set()
            if self._thread is not None:
                self._thread.join()

    def beat_for(self, seconds: float) -> None:
        """Write heartbeats in a thread, until ``seconds`` after the last call."""
        self._until = time.monotonic() + seconds
        with self._starting:  # two sensors tick at the same time
            if self._thread is None or not self._thread.is_alive():
                self._ended.clear()
                self._thread = threading.Thread(target=self._beat, name="store-driver", daemon=True)
                self._thread.start()

    def _beat(self) -> None:
        for count in itertools.count(2):
            if self._is_replaced():
                return  # the heartbeat is that of the home that has taken the project over
            self.write(count)
            if self._ended.wait(_BEAT_S) or time.monotonic() > self._until:
                break
        if not self._is_replaced():
            self.write(0)

    def write(self, count: int) -> None:
        """``count`` changes while the driver runs; 0: it has ended. A failure is only logged."""
        beat = {"home": self._home(), "host": socket.gethostname(), "count": count}
        try:
            self._remote().write(_NAME, json.dumps(beat).encode())
        except TransientError as error:
            LOG.warning("%s", error)

    def _is_replaced(self) -> bool:
        """Whether another home has continued the project and writes its heartbeat; no, if the store cannot be reached.

        A heartbeat alone does not prove it: the driver of a home that lost the project may have written it late.
        """
        try:
            home = self._home()
            return self._read().get("home", home) != home and not self._holds_project()
        except TransientError:
            return False

    def refuse_other(self) -> None:
        """Raise UserError if the driver of another home writes a new heartbeat; without one wait for three times its
        interval. The clocks of two hosts are not compared. A heartbeat of this home, if it has lost the project, was
        written late and says nothing.
        """
        first, home = self._read(), self._home()
        if first.get("home") == home and self._holds_project():
            return
        if first.get("home") != home and not first.get("count"):
            return
        until = time.monotonic() + 3 * _BEAT_S
        while time.monotonic() < until:
            time.sleep(_BEAT_S / 5)
            seen = self._read()
            if seen.get("count") and seen.get("home") != home and seen != first:
                raise UserError(
                    f"store_url {self._remote().url}: host {seen.get('host')} drives this project: on that host "
                    "wait for `rft run`, or stop the daemon, before you continue the project here"
                )

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._remote().read(_NAME) or b"{}")
        except ValueError:  # truncated
            return {}
        return found
