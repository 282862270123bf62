"""Kill the processes of a real ``rft serve`` at seeded moments: service, engine, trainer and daemon."""

import asyncio
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
import yaml

from chaos.driver_mode import environment
from chaos.online.checks import check
from chaos.online.customers import Customers
from chaos.process_table import HomeProcess, processes_with_role
from chaos.progress_probe import Progress, current_progress
from rft_platform.common.errors import RftError
from rft_platform.common.files import last_lines
from rft_platform.config.home import Home
from rft_platform.online.project import open_project
from rft_platform.recipes.tiny_model import build_model
from tests.support.ports import free_port

CUSTOMERS = 4
_TIMEOUT = aiohttp.ClientTimeout(30)
_PAUSE_S = 2.5  # of a customer, on average; the campaign ends when all their rows are trained on
_GROUP, _BATCH, _STEPS = 2, 16, 2
_VICTIMS = {"service": 0.3, "engine": 0.25, "trainer": 0.2, "daemon": 0.25}
_LATEST_S = 12.0  # longest time between a recovery and the next kill
_TRAINS_S = 90.0  # longest wait for a training, in which the trainer is to be killed
_READY_S = 600.0
_STOP_S = 90.0
_RFT = [sys.executable, "-P", "-m", "rft_platform"]

Condition = Callable[[], bool | Coroutine[Any, Any, bool]]


@dataclass
class ServedCampaign:
    """One home, its ``rft serve``, customers, and the kills."""

    folder: Path
    seed: int
    log: Callable[[str], None] = lambda line: None
    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)  # of the round, at the kills
    recovery_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.home, self.port = Home(self.folder / "home"), free_port()
        self.customers = Customers(f"http://127.0.0.1:{self.port}", CUSTOMERS, self.seed, _PAUSE_S)
        self._output = self.folder / "serve.log"
        self._environment = environment(self.home.root, RFT_SENSOR_INTERVAL_S="1", OMP_NUM_THREADS="1")
        self._serve: subprocess.Popen[bytes] | None = None

    def run(self, kills: int) -> dict[str, Any]:
        """Serve, kill, wait until all is back and a further round has trained; returns the report."""
        began = time.perf_counter()
        self._write_config()
        try:
            asyncio.run(self._run(kills))
        finally:
            self._stop()
        found = check(open_project(self.home), self.home.root / "online" / "traffic.db", self.customers.diary)
        diary = self.customers.diary
        return {
            "seed": self.seed,
            "kills": dict(self.kills),
            "rounds_at_the_kills": dict(self.phases),
            "recovery_s": {
                name: {"median": round(median(each), 1), "longest": round(max(each), 1)}
                for name, each in sorted(self.recovery_s.items())
            },
            "wall_s": round(time.perf_counter() - began, 1),
            "answers": dict(sorted(diary.statuses.items())),
            "cut_by_kills": diary.cut,
            **found.to_json(),
        }

    async def _run(self, kills: int) -> None:
        generator = random.Random(self.seed)
        self._start()
        await self._until(self._answers, "the service answers")
        living = asyncio.create_task(self.customers.live())
        committing = asyncio.create_task(self._commit_now_and_then())
        await self._until(lambda: self._trained() >= 1, "the first round has trained")
        for number in range(kills):
            await self._kill(generator, number)
        trained = self._trained()
        await self._until(lambda: self._trained() > trained, "a round trains after the last kill")
        self.customers.stop()
        await living
        committing.cancel()
        await self._until(self._rests, "no round is open")

    async def _kill(self, generator: random.Random, number: int) -> None:
        """Kill one process and wait until it is back."""
        role = generator.choices(list(_VICTIMS), list(_VICTIMS.values()))[0]
        await asyncio.sleep(generator.uniform(0.0, _LATEST_S))
        if role == "trainer":  # between two trainings nothing depends on it
            await self._wait(lambda: current_progress(self.home).phase == "training", _TRAINS_S)
            await asyncio.sleep(generator.uniform(0.0, 2.0))
        found = processes_with_role(self.home, role)
        if not found:
            self.log(f"kill {number + 1}: no {role} runs")
            return
        before, at = current_progress(self.home), time.monotonic()
        for each in found:
            _end(each)
        if role == "engine":
            self.customers.diary.engine_kills.append(at)
        victims = {each.pid for each in found}
        await self._until(lambda: self._is_back(role, victims, before), f"kill {number + 1}: the {role} is back")
        if role in ("service", "engine"):
            await self._until(self._answers, f"kill {number + 1}: chats are answered after the kill of the {role}")
        seconds = time.monotonic() - at
        self.kills[role] += 1
        self.phases[before.phase] += 1
        self.recovery_s[role].append(seconds)
        rated = len(self.customers.diary.acknowledged)
        self.log(f"kill {number + 1}: {role} during {before.phase}, back after {seconds:.1f} s; {rated} ratings")

    def _is_back(self, role: str, victims: set[int], before: Progress) -> bool:
        """Whether a successor runs; after a kill of trainer or daemon also whether a round made progress."""
        if role in ("trainer", "daemon") and current_progress(self.home).position <= before.position:
            return False
        return any(each.pid not in victims for each in processes_with_role(self.home, role))

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def _answers(self) -> bool:
        """Whether a chat is answered."""
        body = {"model": "m", "messages": [{"role": "user", "content": "1+1?"}]}
        url = self._url("/v1/chat/completions")
        try:
            async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.post(url, json=body) as answer:
                await answer.read()
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with aiohttp.ClientSession() as session, session.post(self._url("/commit"), json={}) as answer:
                    await answer.read()

    async def _until(self, holds: Condition, what: str) -> None:
        if not await self._wait(holds, _READY_S):
            raise RftError(
                f"{what}: not after {_READY_S:.0f} s; the end of {self._output}:\n{last_lines(self._output)}"
            )

    async def _wait(self, holds: Condition, limit_s: float) -> bool:
        """Wait until ``holds``; False at the time limit. Raises RftError if ``rft serve`` has ended."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            found = holds()
            if found is True or (found is not False and await found):
                return True
            if self._serve is not None and self._serve.poll() is not None:
                log = last_lines(self._output)
                raise RftError(f"rft serve ended with code {self._serve.returncode}; the end of {self._output}:\n{log}")
            await asyncio.sleep(0.1)
        return False

    def _trained(self) -> int:
        """The newest round that has ended."""
        notes = self.home.rounds.glob("r*/evaluation.json")
        return max((int(note.parent.name[1:]) for note in notes), default=0)

    def _rests(self) -> bool:
        """Whether every round has ended, and no rows are left for another one."""
        rounds = max((int(each.name[1:]) for each in self.home.rounds.glob("r*")), default=0)
        with closing(sqlite3.connect(self.home.root / "online" / "traffic.db", timeout=30)) as connection:
            (rows,) = connection.execute("SELECT count(*) FROM calls WHERE state = 'committed'").fetchone()
        return self._trained() >= rounds and rows < _BATCH * _STEPS

    def _write_config(self) -> None:
        """A project with groups of two runs, without held-out tasks and warm start: its rounds take seconds."""
        build_model(self.folder / "model")
        config = {
            "mode": "both",
            "project": "chaos",
            "name": "online",
            "model": {"model_path": str(self.folder / "model"), "max_model_len": 64, "max_response_tokens": 4},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": _GROUP, "optimizer": {"lr": 1.0e-5}},
            "buffer": {
                "train_batch_size": _BATCH,
                "trainer_input": {"experience_buffer": {"storage_type": "sql"}},
            },
            "synchronizer": {"sync_interval": _STEPS},
            "service": {"group_deadline_s": 1.0e9},
            "explorer": {"proxy_port": self.port},
        }
        (self.folder / "rft.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def _start(self) -> None:
        ports = ["--port", str(free_port()), "--mlflow-port", str(free_port())]
        with self._output.open("ab") as output:
            self._serve = subprocess.Popen(
                [*_RFT, "serve", "--config", str(self.folder / "rft.yaml"), *ports],
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _stop(self) -> None:
        if self._serve is not None:
            self._serve.terminate()
            try:
                self._serve.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._serve.kill()
                self._serve.wait()
        subprocess.run([*_RFT, "stop"], env=self._environment, stdout=subprocess.DEVNULL, timeout=_STOP_S, check=True)


def _end(process: HomeProcess) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(process.pid).kill()
