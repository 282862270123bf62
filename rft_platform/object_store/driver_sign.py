"""Signs of life of the home that drives a project: ``driver.json`` on the object store.

They refuse a second driver early. They are not the fence: a home that took over while the other one was only slow has
the next commit, and the other one stops there.
"""

import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rft_platform.common.errors import TransientError, UserError
from rft_platform.object_store.remote_files import RemoteFiles

LOG = logging.getLogger(__name__)
_NAME = "driver.json"
_BEAT_S = 5.0


class DriverSign:
    """The signs of life of ``home``, and those of other homes."""

    def __init__(self, remote: RemoteFiles, home: str) -> None:
        self._remote = remote
        self._home = home

    @contextmanager
    def running(self) -> Iterator[None]:
        """Give signs of life during the block."""
        ended = threading.Event()

        def beat() -> None:
            for count in itertools.count(3):
                if ended.wait(_BEAT_S):
                    break
                self.show(count)

        self.show(2)
        thread = threading.Thread(target=beat, name="store-driver", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.show(0)

    def show(self, count: int) -> None:
        """``count`` changes while the driver runs; 0: it has ended. A failure is only logged."""
        sign = {"home": self._home, "host": socket.gethostname(), "count": count}
        try:
            self._remote.write(_NAME, json.dumps(sign).encode())
        except TransientError as error:
            LOG.warning("%s", error)

    def refuse_other(self) -> None:
        """Raise UserError if the driver of another home gives a new sign of life; without one wait for three times its
        interval. The clocks of two hosts are not compared.
        """
        first = self._read()
        if first.get("home", self._home) == self._home or not first.get("count"):
            return
        until = time.monotonic() + 3 * _BEAT_S
        while time.monotonic() < until:
            time.sleep(_BEAT_S / 5)
            seen = self._read()
            if seen.get("count") and seen != first:
                raise UserError(
                    f"store_url {self._remote.url}: a driver on host {seen.get('host')} runs this project: wait for "
                    "it, or interrupt it, before you continue the project here"
                )

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._remote.read(_NAME) or b"{}")
        except ValueError:  # truncated
            return {}
        return found
