"""Engines of an online project beside the serving one: whether there is room for them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_platform.cluster.interface import Node
from rft_platform.common.errors import UserError
from rft_platform.config.memory_plan import MemoryChoice
from rft_platform.rounds.setup import side_engines
from rft_platform.rounds.setup.side_engines import auxiliary_spec, connect_candidate_engine, shares_engine
from tests.support.builders import load_text


def project_on(folder: Path, *nodes: Node, mode: str = "both", device: str = "auto") -> Any:
    """An online project with one engine and two ranks; on a Ray cluster if it has ``nodes``."""
    kind = "ray" if nodes else "local"
    text = (
        "model: {model_path: /models/m}\n"
        f"mode: {mode}\n"
        f"engine: {{device: {device}}}\n"
        f"cluster: {{kind: {kind}}}\n"
        "trainer: {nproc: 2}\n"
    )
    return SimpleNamespace(config=load_text(folder, text), cluster=SimpleNamespace(nodes=lambda: list(nodes)))


def has_room(project: Any) -> tuple[bool, bool]:
    """Whether there is room for the engine of evaluations, and for that of a candidate."""
    return not shares_engine(project), side_engines._has_devices(project, side_engines.CANDIDATE_ENGINE)


@pytest.mark.parametrize("here", [0, 3, 8])
@pytest.mark.parametrize("mode", ["both", "serve", "train"])
def test_the_nodes_of_a_ray_cluster_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: int, mode: str
) -> None:
    """Not the GPUs of the control host. Engine and trainer use three GPUs, the trainer two of them on one node."""
    monkeypatch.setattr(side_engines, "gpu_count", lambda: here)
    control = Node("10.0.0.1", 8, 0)
    rooms = {
        (3,): (False, False),
        (4,): (True, False),
        (5,): (True, True),
        (1, 3): (True, False),
        (1, 1, 3): (True, True),
    }
    rooms[1, 1, 1, 1, 1] = (False, False)  # no node has two for the ranks
    for gpus, expected in rooms.items():
        nodes = [control, *(Node(f"10.0.1.{number}", 8, held) for number, held in enumerate(gpus))]
        assert has_room(project_on(tmp_path, *nodes, mode=mode)) == expected, gpus
    crowded = project_on(tmp_path, control, Node("10.0.1.1", 8, 3), mode=mode)
    with pytest.raises(UserError, match=r"no node has room \(there is 10.0.0.1: 8 CPUs, 0 GPUs; 10.0.1.1: 8 CPUs, 3"):
        connect_candidate_engine(crowded)


def test_engines_on_processors_need_a_node_with_enough_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_engines, "gpu_count", lambda: 0)
    for cpus, expected in ((3, (False, False)), (4, (True, False)), (5, (True, True))):
        assert has_room(project_on(tmp_path, Node("10.0.0.1", cpus, 0), device="cpu")) == expected, cpus


@pytest.mark.parametrize(("here", "expected"), [(0, (True, True)), (4, (True, False)), (5, (True, True))])
def test_the_gpus_of_one_machine_decide_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: int, expected: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(side_engines, "gpu_count", lambda: here)
    project = project_on(tmp_path)
    monkeypatch.setattr(type(project.config), "online", True)
    assert has_room(project) == expected
    if not expected[1]:
        with pytest.raises(UserError, match="no GPU is left for the engine of a candidate"):
            connect_candidate_engine(project)


def test_a_candidate_needs_an_engine_that_can_be_started(tmp_path: Path) -> None:
    project = project_on(tmp_path)
    engine = project.config.engine.model_copy(update={"urls": ["http://10.0.0.1:8000"]})
    project.config = project.config.model_copy(update={"engine": engine})
    with pytest.raises(UserError, match=r"engine\.urls names all engines, so none can be started for a candidate"):
        connect_candidate_engine(project)


@pytest.mark.parametrize(
    ("number", "given", "expected"),
    [(0, "", (0.31, True)), (0, ", gpu_memory_utilization: 0.2", (0.2, True)), (1, "", (0.9, False))],
)
def test_an_auxiliary_engine_on_a_gpu_of_the_trainer_has_the_planned_share_and_sleeps(
    tmp_path: Path, number: int, given: str, expected: tuple[float, bool]
) -> None:
    """The first replica of the judge is on the GPU of the second rank, the second replica on a GPU of its own."""
    text = (
        "model: {model_path: /models/m}\n"
        "mode: colocate\n"
        "trainer: {nproc: 2}\n"
        f"explorer: {{auxiliary_models: [{{model_path: /models/judge, engine_num: 2{given}}}]}}\n"
    )
    memory = MemoryChoice(8192, False, False, 0.31, engine_sleeps=True)
    project: Any = SimpleNamespace(config=load_text(tmp_path, text), gpus=3, memory=memory)
    (judge,) = project.config.explorer.auxiliary_models
    options = auxiliary_spec(project, judge, number).vllm
    assert (options.gpu_memory_utilization, options.sleeps) == expected
