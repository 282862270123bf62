"""A process that has imported the service and forks it in milliseconds: hundreds of kills need hundreds of starts.

``python -m chaos.online.forks`` reads one JSON object a line, ``{"what": "serve" | "collect", "arguments": [...]}``,
and answers each with the process id of the child. It ends with its standard input.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


class Forks:
    """The client's side: starts children by request."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.online.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **environment},
        )

    def start(self, what: str, arguments: Sequence[str]) -> int:
        """Start a child and return its process id."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"what": what, "arguments": list(arguments)}), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process; its children live on."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def main() -> None:
    """Fork a child for every line."""
    from chaos.online.collector import collect_rounds
    from chaos.online.echo_service import serve

    work = {"serve": serve, "collect": collect_rounds}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = 1
            try:
                sys.stdin.close()
                work[asked["what"]](asked["arguments"])
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(child, flush=True)


if __name__ == "__main__":
    main()
