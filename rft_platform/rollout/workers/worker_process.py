"""The parent's side of one worker process: starts it, exchanges messages, kills it with all its descendants."""

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import rft_platform
from rft_platform.common.user_code import OWN_SAFE_PATH, SAFE_PATH

_LINE_BYTES = 2**30  # limit of one message: a run may have many long calls
_ENDING_S = 5.0


class WorkerProcess:
    """A process that makes one attempt at a time."""

    def __init__(self, python: str, log: Path, env: Mapping[str, str]) -> None:
        """Start the process. Raises OSError if ``python`` cannot be run."""
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        try:
            with log.open("ab") as out:
                self._process = subprocess.Popen(
                    [python, "-m", "rft_platform.rollout.workers.worker", str(theirs.fileno()), str(lifeline)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(), lifeline),
                    start_new_session=True,  # its own process group; the parent handles Ctrl-C
                    env=dict(env),
                )
        except BaseException:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._socket = ours
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ended = False
        self.idle = False  # ready for an attempt

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""
        return self._process.pid

    async def send(self, message: bytes) -> None:
        """Send a message. If the process has ended, this raises nothing: ``receive`` reports the end."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=_LINE_BYTES)
        with suppress(ConnectionError):
            self._writer.write(message)
            await self._writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the process has ended or closed its connection."""
        assert self._reader is not None, "it speaks when it is spoken to"
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    async def ask(self, message: bytes) -> dict[str, Any] | None:
        """Send a message and return its answer."""
        await self.send(message)
        return await self.receive()

    async def how_it_ended(self) -> str:
        """A verb phrase that says how the process ended: with an exit code, or killed by a signal."""
        try:
            code = await asyncio.to_thread(self._process.wait, _ENDING_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (the kernel does this when memory runs out)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def kill(self) -> None:
        """Kill the process at once, with its process group and all its descendants."""
        if self._ended:
            return
        self._ended, self.idle = True, False
        family: list[psutil.Process] = []
        with suppress(psutil.Error):
            family = psutil.Process(self.pid).children(recursive=True)  # also those in other sessions
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # the guardian is in the group, so the id is not reused
        for member in family:
            with suppress(psutil.Error):
                member.kill()
        with suppress(subprocess.TimeoutExpired):  # do not wait for a process in uninterruptible sleep
            self._process.wait(_ENDING_S)
        os.close(self._lifeline)
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.transport.abort()


def worker_environment(python: str | None, folder: Path) -> dict[str, str]:
    """Environment variables of a worker. With another interpreter, only this package is added to its import path.

    ``folder`` gets a link to the package, and is added instead of the package's parent folder, which may contain
    libraries of this environment.
    """
    env = os.environ | {SAFE_PATH: OWN_SAFE_PATH}
    if python is not None:
        link = folder / "rft_platform"
        if not link.exists():
            link.symlink_to(Path(rft_platform.__file__).parent)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH")]))
    return env
