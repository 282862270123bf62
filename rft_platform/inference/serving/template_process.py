"""Render chat templates in a separate process with limits of processor time and memory.

One process renders all templates of a program. The first use starts the process. If a template exceeds the processor
time, the kernel kills the process, and the next use starts another one.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rft_platform.common.errors import EngineError, UserError
from rft_platform.inference.serving.template_worker import CPU_SECONDS

WORKER = "rft_platform.inference.serving.template_worker"
ANSWER_TIMEOUT_S = 120.0  # in wall time, for a worker that gets no processor time and so never reaches that limit
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL")  # variables without secrets
_TOO_SLOW = (-signal.SIGPROF, -signal.SIGKILL)


class TemplateLimitError(UserError):
    """A template exceeded the limits of processor time or memory."""


class TemplateProcess:
    """Client of the rendering process; safe to share between threads. Requests are rendered one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def start(self) -> None:
        """Start the worker if none runs. Its imports take seconds, during which the caller can do other work."""
        with self._lock:
            self._running()

    def render(
        self,
        source: str,
        conversations: Sequence[Any],
        tools: Any,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> list[str]:
        """The text of each conversation under the template ``source``.

        Raises UserError if the template refuses the conversations or exceeds its limits.
        """
        request = {
            "source": source,
            "conversations": list(conversations),
            "tools": tools,
            "variables": dict(variables),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages and tools must be JSON values: {error}") from error
        with self._lock:
            answer = self._ask(line)
        if "error" in answer:
            kind = TemplateLimitError if answer["error"].startswith("MemoryError") else UserError
            raise kind(f"the chat template refuses these messages: {answer['error']}")
        texts: list[str] = answer["texts"]
        return texts

    def _ask(self, line: bytes) -> dict[str, Any]:
        worker = self._running()
        try:
            answer: dict[str, Any] = json.loads(worker.ask(line))
        except (OSError, ValueError) as error:
            self._worker = None
            code = worker.end()
            if code not in _TOO_SLOW:
                raise EngineError(f"the process that renders chat templates ended with exit code {code}") from error
            raise TemplateLimitError(
                f"the chat template did not render these messages within {CPU_SECONDS:g} s of processor time: use "
                "shorter messages, or another template (chat_template)"
            ) from error
        return answer

    def _running(self) -> "_Worker":
        if self._worker is None or not self._worker.is_ours():
            self._worker = _Worker()
        return self._worker


class _Worker:
    """One worker process and its pipes."""

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-P", "-m", WORKER]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._starter = os.getpid()
        self._end = weakref.finalize(self, _end, self._process)

    def is_ours(self) -> bool:
        """Whether the worker runs and was started by this process, not by the parent that it was forked from."""
        return self._starter == os.getpid() and self._process.poll() is None

    def ask(self, line: bytes) -> bytes:
        """Send a line and read the answer. If the worker has ended, raises OSError or returns b"".

        A worker that does not answer within ``ANSWER_TIMEOUT_S`` is killed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(ANSWER_TIMEOUT_S * 1000):
            self._process.kill()
        return self._process.stdout.readline()

    def end(self) -> int:
        """End the worker, by force after 1 s; returns its exit code."""
        self._end()
        return self._process.returncode


def _end(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue
    try:
        process.wait(1)  # the worker ends when its input is closed
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@cache
def template_process() -> TemplateProcess:
    """The program's only instance."""
    return TemplateProcess()
