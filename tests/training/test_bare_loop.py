"""The loop in one file, ``examples/bare_loop.py``, trains a model with a real engine and a real trainer."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rft_platform.experience.store import ExperienceStore

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bare_loop.py"


@pytest.fixture
def bare_loop() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("bare_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.slow
def test_the_example_trains_and_ends_its_processes(
    bare_loop, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(bare_loop, "WARM_STEPS", 50)
    monkeypatch.setattr(bare_loop, "WARM_ENOUGH", 0.03)
    rates = bare_loop.loop(tmp_path, rounds=2, tasks_a_round=64)
    assert len(rates) == 3 and rates[0] >= 0.03 and min(rates) > 0
    store = ExperienceStore(tmp_path / "rounds")
    assert [store.count_rollouts(number) for number in (1, 2)] == [64 * bare_loop.RUNS_OF_A_TASK] * 2
    lines = capsys.readouterr().out.splitlines()
    assert sum("canary" in line for line in lines) == 2
    versions = sorted(
        int(folder.name.rpartition("_")[2]) for folder in (tmp_path / "checkpoints").glob("global_step_*")
    )
    assert len(versions) == 2 and versions[0] > 0
    assert not list(tmp_path.glob("*.json")), "leases are removed when their processes end"
