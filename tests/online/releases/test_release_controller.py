"""The controller of releases with engines that are simulated: what it deploys, and when."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.cluster.local.supervisor import EngineStarts
from rft_platform.common.errors import EngineError, StorageError, UserError
from rft_platform.config.home import Home
from rft_platform.inference.interface import EngineStatus
from rft_platform.online.project import open_project
from rft_platform.online.releases import controller
from rft_platform.online.releases.commands import MOST_FAILURES, decide
from rft_platform.online.releases.controller import ReleaseController
from rft_platform.online.releases.routing import Router
from rft_platform.online.releases.versions import release_commands
from rft_platform.online.traffic.database import FIRST_IMPORTED
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, Start, publish, write


class SimulatedEngine:
    """An engine that notes the versions it loads."""

    base_url, api_key = "http://127.0.0.1:1/v1", "key"

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.lost = False
        self._status = EngineStatus("simulated", "model", 0, "digest 0", "", False, "float32", 512, 1, 0.0)

    def status(self) -> EngineStatus:
        if self.lost:
            raise EngineError("no answer")
        return self._status

    def pause(self, mode: str) -> None:
        self._status = replace(self._status, paused=True)

    def resume(self) -> None:
        self._status = replace(self._status, paused=False)

    def fetch_weights(self, folder: Path) -> None:
        """Does nothing, because the process sees all folders."""

    def update_weights(self, folder: Path, policy_version: int) -> None:
        if folder.name == "damaged":
            raise UserError("these weights are damaged")
        self.loaded.append(policy_version)
        digest = f"digest {folder.name}"
        self._status = replace(self._status, policy_version=policy_version, weights_digest=digest)


class World:
    """A project, its controller and its engines."""

    def __init__(self, folder: Path, canary_share: float = 0.0, gated: bool = False, restarts: bool = True) -> None:
        model = folder / "model"
        model.mkdir()
        config: dict[str, Any] = {
            "project": "shop", "name": "helper", "mode": "serve", "checkpoint_root_dir": str(folder / "checkpoints"),
            "model": {"model_path": str(model)},
            "algorithm": {"algorithm_type": "ppo"},
            "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
            "service": {"canary_share": canary_share},
            "evaluation": {"after_refusal": "restart" if restarts else "continue"},
        }  # fmt: skip
        if gated:
            tasks = folder / "tasks.jsonl"
            tasks.write_text('{"question": "1+1", "answer": "2"}\n')
            config["buffer"]["explorer_input"] = {"eval_tasksets": [{"name": "held-out", "path": str(tasks)}]}
        home = folder / "home"
        home.mkdir(mode=0o700)
        (home / "rft.yaml").write_text(yaml.safe_dump(config))
        self.project = open_project(Home(home))
        self.commands = release_commands(self.project)
        self.base, self.candidate = SimulatedEngine(), SimulatedEngine()
        self.connected: list[str] = []
        self.controller = ReleaseController(
            self.project, self.commands.store, self._connect("base"), self._connect("candidate")
        )
        self.publish(0)

    def _connect(self, name: str) -> Callable[[Project], Any]:
        def connect(_: Project) -> Any:
            self.connected.append(name)
            return getattr(self, name)

        return connect

    def publish(self, version: int, *, promoted: bool = False, damaged: bool = False) -> None:
        folder = "damaged" if damaged else str(version)
        publish(self.project.store, Policy(folder, version, f"digest {version}", round=version))
        write(self.project.store, version, RoundEvaluation(promoted=promoted))

    def start(self) -> Router:
        return Router(self.controller.find_engine())


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_DECIDE_S", 0.0)


def test_new_versions_serve_once_they_are_released(tmp_path) -> None:
    world = World(tmp_path, gated=True)
    router = world.start()
    world.publish(1)
    world.controller.step(router)
    assert world.base.loaded == [], "its evaluation did not promote it"
    world.publish(2, promoted=True)
    world.controller.step(router)
    assert (world.base.loaded, router.base.status.policy_version) == ([2], 2)
    world.commands.roll_back(1)
    world.controller.step(router)
    world.publish(3, promoted=True)
    world.controller.step(router)
    assert world.base.loaded == [2, 1], "a choice holds until the next one"
    world.commands.promote(None)
    world.controller.step(router)
    assert world.base.loaded == [2, 1, 3]


@pytest.mark.parametrize(("deployed", "loads"), [(2, []), (FIRST_IMPORTED + 1, [1])])
def test_a_shared_engine_keeps_the_version_of_an_evaluation_and_no_imported_one(
    tmp_path, monkeypatch: pytest.MonkeyPatch, deployed: int, loads: list[int]
) -> None:
    monkeypatch.setattr(controller, "shares_engine", lambda project: True)
    world = World(tmp_path)
    world.publish(1)
    world.base.update_weights(Path("other"), deployed)
    world.base.loaded.clear()
    world.start()
    assert world.base.loaded == loads


def test_without_held_out_tasks_a_round_releases_its_version(tmp_path) -> None:
    world = World(tmp_path)
    router = world.start()
    world.publish(1)
    world.controller.step(router)
    assert world.base.loaded == [1]


def test_a_release_uses_an_engine_of_its_own(tmp_path) -> None:
    world = World(tmp_path)
    world.publish(1)
    router = world.start()
    world.commands.canary(0, share=0.5)
    world.controller.step(router)
    assert (router.release.number, router.release.candidate.status.policy_version) == (1, 0)
    assert world.connected == ["base", "candidate"]
    world.publish(2)
    world.controller.step(router)
    assert world.base.loaded == [1], "the base stays while the release runs"
    router.candidate_failures = MOST_FAILURES
    world.controller.step(router)
    world.controller.step(router)
    assert (router.release, world.commands.store.served()) == (None, 1)


def test_a_lost_candidate_is_started_again(tmp_path) -> None:
    world = World(tmp_path)
    world.publish(1)
    router = world.start()
    world.commands.canary(0, share=0.5)
    world.controller.step(router)
    world.candidate.lost = True
    world.controller.step(router)
    assert router.release is None
    world.candidate = SimulatedEngine()
    world.controller.step(router)
    assert router.release.number == 1
    assert world.connected == ["base", "candidate", "candidate"]


def test_a_candidate_that_cannot_be_served_is_rolled_back(tmp_path) -> None:
    world = World(tmp_path)
    router = world.start()
    world.publish(1, damaged=True)
    world.commands.store.serve(0, "promoted", "the first")
    world.commands.canary(1)
    world.controller.step(router)
    assert (router.release, world.commands.store.running(), world.commands.store.served()) == (None, None, 0)
    assert "damaged" in world.commands.store.newest()[0].reason


def test_new_versions_start_as_canaries_where_configured(tmp_path) -> None:
    world = World(tmp_path, canary_share=0.2)
    router = world.start()
    world.controller.step(router)
    assert world.commands.store.served() == 0
    world.publish(1)
    world.controller.step(router)
    running = world.commands.store.running()
    assert (running.kind, running.base_version, running.candidate_version, running.share) == ("canary", 0, 1, 0.2)
    world.controller.step(router)
    assert router.release.candidate.status.policy_version == 1
    world.commands.roll_back()
    for _ in range(3):
        world.controller.step(router)
    assert world.commands.store.running() is None, "a version is a canary once"
    write(world.project.store, 2, Start(0, 0, [1], "withdrawn", True))
    world.publish(2)
    world.controller.step(router)
    assert world.commands.store.running().candidate_version == 2


def test_a_lost_engine_is_found_again(tmp_path) -> None:
    world = World(tmp_path)
    router = world.start()
    world.publish(1)
    world.base.lost = True
    with pytest.raises(EngineError):
        world.controller.step(router)
    world.base = SimulatedEngine()
    assert world.controller.find_engine().status.policy_version == 1


def test_an_engine_may_be_lost_while_a_step_decides(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    router = world.start()
    is_due = world.controller._is_due

    def lost(*arguments: Any) -> bool:
        world.base.lost = True
        with pytest.raises(EngineError):
            world.controller.find_engine()
        return is_due(*arguments)

    monkeypatch.setattr(world.controller, "_is_due", lost)
    world.controller.step(router)
    assert router.base.status.policy_version == 0


def test_a_search_for_an_engine_waits_for_a_deployment(tmp_path) -> None:
    world = World(tmp_path)
    world.start()
    finding = threading.Thread(target=world.controller.find_engine)
    with world.controller._deploying:
        finding.start()
        finding.join(0.2)
        assert world.controller._base is world.base
    finding.join()
    assert world.connected == ["base", "base"]


def test_a_chosen_version_that_is_gone_is_an_error(tmp_path) -> None:
    world = World(tmp_path)
    router = world.start()
    world.commands.store.serve(7, "promoted", "by hand")
    with pytest.raises(StorageError, match="policy version 7"):
        world.controller.step(router)


def test_a_person_who_decides_first_is_obeyed(tmp_path) -> None:
    world = World(tmp_path)
    world.publish(1)
    router = world.start()
    running = world.commands.canary(0, share=0.5)
    world.controller.step(router)
    world.commands.promote(0)
    assert decide(world.commands.store, running, MOST_FAILURES) == "promoted"
    assert world.commands.store.served() == 0


def test_an_engine_that_cannot_be_started_is_tried_again_with_pauses(tmp_path) -> None:
    now, attempts = [0.0], []
    starts = EngineStarts[str](lambda: now[0])

    def fail() -> str:
        attempts.append(now[0])
        raise EngineError("out of memory\nmore")

    for now[0] in range(60):
        with pytest.raises(EngineError, match="out of memory"):
            starts.attempt(fail)
    assert attempts == [0, 1, 2, 3, 8, 18, 38], "three at once, then after 5, 10, 20 and 40 s"
    assert starts.problem == "the engine could not be started 7 times in ten minutes: out of memory"
    now[0] = 78.0
    assert starts.attempt(lambda: "engine") == "engine"
    assert starts.problem is None


@pytest.mark.parametrize("restarts", [True, False])
def test_no_canary_brings_a_withdrawn_version_back(tmp_path, restarts: bool) -> None:
    world = World(tmp_path, canary_share=0.2, restarts=restarts)
    world.publish(1)
    router = world.start()
    world.controller.step(router)
    assert world.commands.store.served() == 1, "the first version, without a canary"
    assert world.commands.roll_back(None, "it leaks secrets") == 0
    world.controller.step(router)
    assert world.commands.store.running() is None
    world.publish(2)  # trained from version 1
    world.controller.step(router)
    running = world.commands.store.running()
    assert (running is None) is restarts, "without a restart all later versions descend from it"
    if restarts:
        write(world.project.store, 3, Start(0, 0, [1, 2], "withdrawn", True))
        world.publish(3)
        world.controller.step(router)
        assert world.commands.store.running().candidate_version == 3
