"""Run a project with `rft run`, which is restarted whenever it ends before the project is finished."""

import os
import subprocess
import sys
import time
from pathlib import Path

from chaos.injector import InjectionResult, inject
from chaos.io_faults import IoFaults
from chaos.records import Ended
from chaos.schedule import Kill, Mode
from chaos.scratch import Scratch
from rft_platform.common.errors import RftError

_MESSAGE_LINES = 12
_TRACEBACK = "Traceback (most recent call last)"
_STUCK_AFTER = 6  # ends without progress in a row after which the project counts as stuck
_RETRY_S = "0.2"  # a short delay before retries, because rounds last a second here


class DriverMode:
    """`rft run` as a child process. Implements ``supervisor.ProjectRunner``."""

    mode: Mode = "driver"

    def __init__(self, scratch: Scratch, name: str = "driver", faults: IoFaults | None = None) -> None:
        self._faults = faults
        self.home, self.config = scratch.home(name), scratch.config
        self.ended: list[Ended] = []
        self.expected: set[int] = set()
        self._scratch = scratch
        self._began = time.monotonic()
        self._rounds = 0
        self._starts = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._log: Path = self.home.logs
        self._finished = False
        self._notes, self._starts_without_progress = -1, 0

    def start(self, rounds: int) -> None:
        """Start or continue with a budget of ``rounds``; a running driver receives the new budget at its next start."""
        self._rounds, self._finished = rounds, False
        if self._child is None:
            self._spawn()

    def maintain(self) -> None:
        """Restart the driver if it ended before its last round; RftError if restarts make no progress."""
        if self._child is None or self._finished or (code := self._child.poll()) is None:
            return
        if code == 0 and self._budget_of_child == self._rounds:
            self._finished = True
            return
        faults = [] if self._faults is None else self._faults.settle()
        by_itself = self._child.pid not in self.expected and not any(fault.signal for fault in faults)
        if by_itself or _TRACEBACK in self._output():
            self.ended.append(Ended("driver", code, self._message(), round(time.monotonic() - self._began, 2)))
        if by_itself and not faults:
            self._check_progress()
        self._spawn()

    def finished(self) -> bool:
        """Whether the last driver completed every round."""
        return self._finished

    def serves(self, role: str) -> bool:
        """Always True: the driver recovers when it makes progress, and it starts engine and trainer itself."""
        return True

    def io_faults(self) -> IoFaults | None:
        """The file system faults; each start of the driver carries some of them."""
        return self._faults

    def inject(self, kill: Kill, timeout_s: float) -> InjectionResult:
        """Kill a process of the target's role."""
        return inject(self.home, kill, timeout_s, self.expected)

    def facts(self) -> dict[str, float]:
        """No measurements of its own."""
        return {}

    def stop(self) -> None:
        """End the driver if it runs."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            self._child.wait()

    def _check_progress(self) -> None:
        notes = sum(1 for _ in self.home.rounds.glob("r*/*.json"))
        self._starts_without_progress = self._starts_without_progress + 1 if notes == self._notes else 0
        self._notes = notes
        if self._starts_without_progress >= _STUCK_AFTER:
            raise RftError(
                f"`rft run` ended {_STUCK_AFTER} times in a row without getting any further in {self.home.root}; the "
                f"last lines of its log:\n{self._message()}"
            )

    def _spawn(self) -> None:
        self._starts += 1
        self._budget_of_child = self._rounds
        self.home.logs.mkdir(parents=True, exist_ok=True)
        self._log = self.home.logs / f"rft-run-{self._starts:03d}.log"
        command = [sys.executable, "-m", "rft_platform", "run", "--config", str(self.config)]
        with self._log.open("wb") as stream:
            self._child = subprocess.Popen(
                [*command, "--rounds", str(self._rounds)],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                env=environment(self.home.root, **self._injected()), cwd=self._scratch.root, start_new_session=True,
            )  # fmt: skip

    def _injected(self) -> dict[str, str]:
        return {} if self._faults is None else self._faults.environment()

    def _message(self) -> str:
        """The last lines of the output, from the start of the first traceback if there is one."""
        lines = self._output().splitlines()
        first = next((number for number, line in enumerate(lines) if _TRACEBACK in line), len(lines))
        return "\n".join(lines[min(first, max(0, len(lines) - _MESSAGE_LINES)) :])

    def _output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


def environment(home: Path, **more: str) -> dict[str, str]:
    """Environment of a scratch project's processes: its own home, without variables of the caller's other projects."""
    others = ("RFT_", "DAGSTER_", "MLFLOW_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    own = {"RFT_HOME": str(home), "RFT_RETRY_DELAY_S": _RETRY_S, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return inherited | own | more
