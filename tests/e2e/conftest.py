"""A small real project: tiny model, real engine, trainer, Dagster and MLflow; run through the `rft` command."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent


@dataclass
class ProjectFolder:
    """A project's folder and the ``rft`` command working on it."""

    home: Path
    config: Path
    cwd: Path | None = None  # of its processes; the test's own where it is None

    @property
    def environment(self) -> dict[str, str]:
        """The command's environment: its own home, the test's judges importable, one thread."""
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        own = {"RFT_HOME": str(self.home), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        return {**os.environ, **own}

    def rft(self, *arguments: str, check: bool = True, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Run ``rft`` to its end."""
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment,
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            pytest.fail(f"rft {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def command(self, *arguments: str) -> list[str]:
        """The command line, for a process that a test starts itself."""
        return [sys.executable, "-P", "-m", "rft_platform", *arguments]  # as the script `rft`: without its folder

    def json(self, *arguments: str) -> Any:
        """What ``rft ... --json`` prints."""
        return json.loads(self.rft(*arguments, "--json").stdout)

    def note(self, round_number: int, name: str) -> Any:
        """One of the notes a round left about the default policy, with all figures; the folder is absolute."""
        folder = self.home / "rounds" / f"r{round_number:04d}"
        file = next(file for file in folder.glob("*.json") if file.stem.removesuffix("-policy") == name)
        found = json.loads(file.read_text())
        found |= found.get("figures", {})
        return found | {"folder": str(self.home / found["folder"])} if "folder" in found else found


def small_config(folder: Path, base_model: Path, **changes: Any) -> dict[str, Any]:
    """Two rounds of 8 tasks x 4 runs, 2 optimiser steps each, on additions that the untrained model cannot do."""
    tasks, held_out = folder / "tasks.jsonl", folder / "held_out.jsonl"
    _write_additions(tasks, [(a, b) for a in range(4) for b in range(4)])
    _write_additions(held_out, [(a, 9) for a in range(6)])
    judge = {"judge": "judge_by_digits:digit_share"}
    config = {
        "project": "small",
        "name": "e2e",
        "seed": 7,
        "model": {"model_path": str(base_model), "max_model_len": 64, "max_response_tokens": 6},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-3}},
        "buffer": {
            "batch_size": 8,
            "train_batch_size": 16,
            "total_steps": 2,
            "explorer_input": {
                "taskset": {"path": str(tasks), **judge},
                "eval_tasksets": [{"path": str(held_out), "name": "held-out", **judge}],
            },
        },
    }
    return {**config, **changes}


def _write_additions(file: Path, pairs: list[tuple[int, int]]) -> None:
    file.write_text("".join(json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))


@pytest.fixture(scope="session")
def make_config():
    """``small_config``, for tests that start a project themselves."""
    return small_config


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, with_mlflow):
    """Make a project folder with a configuration; its long-lived processes are ended with the tests.

    Its MLflow store is there already, save for the project ``finished``, which makes its own.
    """
    made: list[ProjectFolder] = []

    def make(name: str, **changes: Any) -> ProjectFolder:
        folder = tmp_path_factory.mktemp(name)
        if name != "finished":
            with_mlflow(folder / "home")
        config = folder / "rft.yaml"
        config.write_text(yaml.safe_dump(small_config(folder, tiny_model, **changes)))
        made.append(ProjectFolder(folder / "home", config))
        return made[-1]

    yield make
    for project in made:
        project.rft("stop", check=False)


@pytest.fixture(scope="session")
def finished(make_project) -> ProjectFolder:
    """A project whose two rounds are done."""
    project = make_project("finished")
    project.rft("run", "--config", str(project.config))
    return project
