"""Serve the front desk, and send it customers until its success rate reaches a goal.

``python demo.py`` starts ``rft serve`` with ``rft.yaml``, waits for the warm start, and prints the success rate of each
version of the weights. The home is the folder ``.rft`` here, unless RFT_HOME names another. A repeated call continues.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import yaml

from customers import Customers, Habits

HERE = Path(__file__).parent
RFT = [sys.executable, "-m", "rft_platform"]
SUCCESS_RATE, LIMIT_S = 0.8, 540.0
LOOK_S, STARTED_S, SAY_S, STOP_S = 2.0, 8.0, 30.0, 90.0
ENOUGH = 100  # number of answers from which a success rate is computed


@dataclass(frozen=True)
class Outcome:
    """Result of the demo."""

    before: float  # success rate of the first policy that served
    after: float  # success rate of the newest policy that gave enough answers
    updates: int  # policy versions that served, without the first
    requests: int
    failures: list[str]  # requests that did not succeed
    rated: list[str]  # ids of the answers whose rating was acknowledged
    seconds: float  # since the first question


def run(home: Path, goal: float = SUCCESS_RATE, limit_s: float = LIMIT_S) -> Outcome:
    """Start the service, then the customers; returns when the goal or the time limit is reached."""
    config = yaml.safe_load((HERE / "rft.yaml").read_text())
    url = f"http://127.0.0.1:{config['explorer']['proxy_port']}"
    with served(home, url):
        customers = Customers(url, Habits(seed=config["seed"]))
        started = time.monotonic()
        try:
            watch(customers, goal, started, limit_s)
        finally:
            customers.stop()
    tally, seconds = customers.tally, time.monotonic() - started
    measured = [version for version in sorted(tally.right) if len(tally.right[version]) >= ENOUGH]
    first = min(tally.right, default=0)
    after = tally.rate(measured[-1] if measured else first)
    updates = max(0, len(tally.right) - 1)
    return Outcome(tally.rate(first), after, updates, tally.requests, tally.failures, tally.rated, seconds)


@contextmanager
def served(home: Path, url: str) -> Iterator[None]:
    """Run ``rft serve`` during the block, which starts when the warm start is complete; then end its processes."""
    ports = ["--port", str(free_port()), "--mlflow-port", str(free_port())]
    environment = {**os.environ, "RFT_HOME": str(home), "RFT_SENSOR_INTERVAL_S": "1", "OMP_NUM_THREADS": "1"}
    say("starting the service, then the warm start on demonstrations (about a minute)")
    service = subprocess.Popen([*RFT, "serve", "--config", str(HERE / "rft.yaml"), *ports], env=environment)
    try:
        began = said = time.monotonic()
        while not (answers(url) and has_started(environment)):
            if service.poll() is not None:
                sys.exit(f"rft serve ended with code {service.returncode}; its logs are in {home / 'logs'}")
            if time.monotonic() - said > SAY_S:
                said = time.monotonic()
                say(f"{said - began:4.0f} s  waiting for the service and the warm start")
            time.sleep(STARTED_S)
        yield
    finally:
        service.terminate()
        service.wait(STOP_S)
        subprocess.run([*RFT, "stop"], env=environment, check=False)


def answers(url: str) -> bool:
    """Whether the service runs."""
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def has_started(environment: dict[str, str]) -> bool:
    """Whether the warm start is complete: its policy was evaluated."""
    shown = subprocess.run([*RFT, "rounds", "--json"], env=environment, capture_output=True, check=False)
    rounds = json.loads(shown.stdout)["rounds"] if shown.returncode == 0 else []
    return any(each["pass_rate_sampled"] is not None for each in rounds)


def watch(customers: Customers, goal: float, started: float, limit_s: float) -> None:
    """Print the success rate of each version that has given enough answers, until the goal is reached."""
    tally, printed = customers.tally, set[int]()
    while time.monotonic() - started < limit_s:
        time.sleep(LOOK_S)
        for version in sorted(tally.right):
            if version in printed or len(tally.right[version]) < ENOUGH:
                continue
            printed.add(version)
            rate, at = tally.rate(version), time.monotonic() - started
            failed = f"failed requests {len(tally.failures)}"
            say(f"{at:4.0f} s  policy version {version:3}  success rate {rate:4.0%}  {failed}")
            if version and rate >= goal:
                return


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def main() -> int:
    """Run the demo; exit status 1 if it misses its goal or a request fails."""
    parser = argparse.ArgumentParser(description="Train the front desk by its customers' ratings while it serves them.")
    parser.add_argument("--goal", type=float, default=SUCCESS_RATE, help="success rate at which it ends (%(default)s)")
    parser.add_argument("--minutes", type=float, default=LIMIT_S / 60, help="longest time (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the outcome to this file")
    given = parser.parse_args()
    outcome = run(Path(os.environ.get("RFT_HOME", HERE / ".rft")).absolute(), given.goal, given.minutes * 60)
    say(
        f"success rate {outcome.before:.0%} -> {outcome.after:.0%} in {outcome.seconds:.0f} s: "
        f"{outcome.requests:,} requests, {len(outcome.failures)} failed, {outcome.updates} updates of weights"
    )
    for failure in outcome.failures[:5]:
        say(f"failed request: {failure}")
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(outcome)))
    return 0 if outcome.after >= given.goal and not outcome.failures else 1


if __name__ == "__main__":
    sys.exit(main())
