"""Prepare the front desk, serve it with ``rft serve``, and send it customers until its success rate reaches a goal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import httpx

from rft_platform.cluster.interface import Service
from rft_platform.cluster.local.processes import free_port
from rft_platform.cluster.local.supervisor import Server, serving
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.config.load import dump_config, load_config
from rft_platform.experience.store import ExperienceStore
from rft_platform.jobs.driver_lock import refuse_if_used
from rft_platform.recipes.arithmetic.model import build_model
from rft_platform.recipes.front_desk.customers import Customers, Habits
from rft_platform.recipes.front_desk.questions import corpus, write_questions
from rft_platform.rounds.project.record import RoundEvaluation, read

_START_S = 1800.0  # for machines that are busy with other work; if the service process ends, the wait ends too
_SAY_S = 30.0
_STOP_S = 60.0
_LOOK_S = 2.0
_ENOUGH = 100  # number of answers from which a success rate is computed


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the demo."""

    before: float  # success rate of the starting policy
    after: float  # success rate of the newest policy that gave enough answers
    version: int  # policy version of ``after``, in optimiser steps
    updates: int  # policy versions that served, without the first
    requests: int
    failures: list[str]  # requests that did not succeed
    rated: list[str]  # ids of the answers whose rating was acknowledged
    seconds: float  # since the first question

    def line(self) -> str:
        """The outcome as one line for a terminal."""
        return (
            f"success rate {self.before:.0%} -> {self.after:.0%} in {self.seconds:.0f} s: {self.requests:,} requests, "
            f"{len(self.failures)} failed, {self.updates} weight updates while serving"
        )


@dataclass(frozen=True, slots=True)
class Goal:
    """When the demo ends."""

    success_rate: float = 0.8
    limit_s: float = 540.0


def run(home: Home, seed: int, goal: Goal, say: Callable[[str], None]) -> Outcome:
    """Start the service in a new home, then the customers; returns when the goal or the time limit is reached."""
    if home.config_file.exists():
        raise UserError(
            f"{home.root} holds a project: point RFT_HOME at a new folder, or add --fresh (`make demo-online "
            f"DEMO_ARGS=--fresh`), which first renames {home.root}"
        )
    config = load_config(prepare(home.root / "front_desk"))
    explorer = config.explorer.model_copy(update={"proxy_port": free_port()})
    file = home.root / "front_desk" / "rft.yaml"
    write_text(file, dump_config(config.model_copy(update={"seed": seed, "explorer": explorer})))
    url = f"http://127.0.0.1:{explorer.proxy_port}"
    with served(home, file, url, say):
        customers = Customers(url, Habits(seed=seed))
        started = time.monotonic()
        try:
            _watch(customers, goal, started, say)
        finally:
            customers.stop()
    tally, seconds = customers.tally, time.monotonic() - started
    measured = [version for version in sorted(tally.right) if len(tally.right[version]) >= _ENOUGH] or [0]
    return Outcome(
        before=tally.rate(min(tally.right, default=0)),
        after=tally.rate(measured[-1]),
        version=measured[-1],
        updates=max(0, len(tally.right) - 1),
        requests=tally.requests,
        failures=tally.failures,
        rated=tally.rated,
        seconds=seconds,
    )


def move_aside(home: Home) -> Path | None:
    """Rename the folder of an earlier demo to ``<home>.<time>`` and return the new name; None if there is no folder."""
    if not home.root.exists():
        return None
    if not (home.root / "front_desk").exists() and any(home.root.iterdir()):
        raise UserError(f"RFT_HOME {home.root} is not this demo's; --fresh does not rename it: choose another folder")
    refuse_if_used(home)
    home.cluster.stop_all()
    return home.root.rename(home.root.with_name(f"{home.root.name}.{time.strftime('%Y%m%d-%H%M%S')}"))


def prepare(folder: Path) -> Path:
    """Write ``model/``, ``questions/`` and ``rft.yaml`` below ``folder``; return the path of ``rft.yaml``."""
    build_model(folder / "model", corpus=corpus())
    if not (folder / "questions" / "test.jsonl").exists():
        write_questions(folder / "questions")
    recipe = resources.files("rft_platform.recipes.front_desk").joinpath("rft.yaml").read_text(encoding="utf-8")
    config = folder / "rft.yaml"
    if not config.exists():
        write_text(config, recipe)
    return config


@contextmanager
def served(home: Home, config: Path, url: str, say: Callable[[str], None]) -> Iterator[None]:
    """Run ``rft serve`` with this configuration during the block, which starts when the starting policy is ready.

    At the end of the block, all processes that the service started are ended.
    """
    began = said = time.monotonic()
    start, serves, log = read(ExperienceStore(home.rounds), 0), False, home.logs / "serve.log"

    def is_ready() -> bool:
        """Whether the service and its warm start are ready; report from time to time which of the two is not."""
        nonlocal said, serves
        serves = serves or _answers(f"{url}/health")
        if time.monotonic() - said > _SAY_S:
            said = time.monotonic()
            say(f"{said - began:4.0f} s  waiting for {'the warm start' if serves else 'the service'}")
        return serves and start.has(RoundEvaluation)

    arguments = ["serve", "--config", str(config), "--port", str(free_port()), "--mlflow-port", str(free_port())]
    environment = {"RFT_HOME": str(home.root), "RFT_SENSOR_INTERVAL_S": "1", "OMP_NUM_THREADS": "1"}
    service = Service(
        "serve", "rft_platform", tuple(arguments), env=environment, start_timeout_s=_START_S, grace_s=_STOP_S
    )
    say("starting the service, then the warm start on demonstrations (about a minute)")
    try:
        with serving([Server(service, is_ready)], home.logs):
            say(log.read_text(encoding="utf-8", errors="replace").strip())
            yield
    finally:
        home.cluster.stop_all()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _watch(customers: Customers, goal: Goal, started: float, say: Callable[[str], None]) -> None:
    """Print the success rate of each version that has given enough answers, until the goal is reached."""
    tally, printed = customers.tally, set[int]()
    while time.monotonic() - started < goal.limit_s:
        time.sleep(_LOOK_S)
        for version in sorted(tally.right):
            if version in printed or len(tally.right[version]) < _ENOUGH:
                continue
            printed.add(version)
            rate, at = tally.rate(version), time.monotonic() - started
            failed = f"failed requests {len(tally.failures)}"
            say(f"{at:4.0f} s  policy version {version:3}  success rate {rate:4.0%}  {failed}")
            if version and rate >= goal.success_rate:
                return
