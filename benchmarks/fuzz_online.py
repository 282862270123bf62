"""Fuzz the online service by its OpenAPI document: no answer is a 5xx.

    python benchmarks/fuzz_online.py --requests 20000
    python -m venv /tmp/fuzz && /tmp/fuzz/bin/pip install schemathesis
    python benchmarks/fuzz_online.py --requests 20000 --schemathesis /tmp/fuzz/bin/schemathesis --examples 100

First the random requests of ``tests/fuzz/test_fuzz_service.py``, then those of schemathesis at a process of its own.
Writes ``results/fuzz_online.json``; exit code 1 where a request failed.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import online_load

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the requests are the tests' own

from tests.fuzz.test_fuzz_service import attack_service  # noqa: E402


class Counting:
    """A proxy that counts the answers by operation and status, for the numbers of the report."""

    def __init__(self, port: int) -> None:
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []
        self._port = port

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on, and read the status lines of what comes back."""
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def forward() -> None:
            while data := await reader.read(1 << 16):
                other_writer.write(data)
            other_writer.close()

        async def back() -> None:
            while data := await other_reader.read(1 << 16):
                if data.startswith(b"HTTP/1."):
                    status = data[9:12].decode()
                    self.statuses[status] += 1
                    if status >= "500" and len(self.failures) < 20:
                        self.failures.append(data[:500].decode(errors="replace"))
                writer.write(data)
            writer.close()

        await asyncio.gather(forward(), back(), return_exceptions=True)


async def fuzz(port: int, given: argparse.Namespace) -> tuple[Counting, int, str]:
    """Run schemathesis through the counting proxy."""
    counting = Counting(port)
    server = await asyncio.start_server(counting.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    command = [
        given.schemathesis, "run", f"{url}/openapi.json", "--url", url, "--checks", "not_a_server_error",
        "--max-examples", str(given.examples), "--phases", "examples,coverage,fuzzing", "--seed", str(given.seed),
        "--suppress-health-check", "all", "--no-color",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:  # it keeps a cache there
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await process.communicate()
    server.close()
    assert process.returncode is not None
    return counting, process.returncode, output.decode(errors="replace")


def run_own(requests: int) -> dict[str, Any]:
    """The requests of the tests, in this process."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        statuses, failures = asyncio.run(attack_service(Path(folder), requests))
    return {
        "requests": statuses.total(),
        "seconds": round(time.perf_counter() - began, 1),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "failures": failures[:20],
    }


def run_schemathesis(given: argparse.Namespace) -> dict[str, Any]:
    """Valid and invalid requests for every operation, at a service before an engine that echoes."""
    version = subprocess.run([given.schemathesis, "--version"], capture_output=True, text=True, check=True).stdout
    began = time.perf_counter()
    with online_load.service(0.0) as (_, port, pid, _database):
        counting, status, output = asyncio.run(fuzz(port, given))
        memory = online_load.psutil.Process(pid).memory_info().rss / 2**20
    print(output[-2000:])
    failed = [f"exit status {status}"] if status else []
    return {
        "tool": version.strip(),
        "seed": given.seed,
        "examples_an_operation": given.examples,
        "seconds": round(time.perf_counter() - began, 1),
        "requests": counting.statuses.total(),
        "statuses": dict(sorted(counting.statuses.items())),
        "failures": counting.failures + failed,
        "rss_mb": round(memory, 1),
    }


def main() -> int:
    """Fuzz and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--schemathesis", help="the program; without it only our own requests")
    parser.add_argument("--examples", type=int, default=100, help="of each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "fuzz_online.json")
    given = parser.parse_args()
    found = {
        "what": "random requests for the OpenAPI document of the online service",
        "date": time.strftime("%Y-%m-%d"),
    }
    found |= {"own": run_own(given.requests)}
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    if given.schemathesis:
        found |= {"schemathesis": run_schemathesis(given)}
        given.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(any(each["failures"] for each in found.values() if isinstance(each, dict)))


if __name__ == "__main__":
    sys.exit(main())
