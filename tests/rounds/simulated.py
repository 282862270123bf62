"""A project whose rounds run without models: real notes, real judgements, real selections, made-up rewards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.experience.record import JudgedRow
from rft_platform.experience.selections import read_selection
from rft_platform.rounds.explore import snapshot_for
from rft_platform.rounds.planning.plan import ProjectState
from rft_platform.rounds.planning.project_state import Launches, observe
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Explored,
    Judged,
    Policy,
    RoundEvaluation,
    RowSelection,
    parent_of,
    publish,
    published,
    write,
)
from rft_platform.rounds.selection.row_selection import select_rows

REPEAT = 2
GROUPS = 2
ROWS = GROUPS * REPEAT  # of a batch


def simulated(
    folder: Path, batches: int = 6, *, train_batch_size: int = ROWS, replay: Any = None, **sync: Any
) -> "Simulated":
    """A started project of so many explore batches of 4 rows; ``sync`` is the section ``synchronizer``."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "3"}\n')
    config = {
        "model": {"model_path": "unused"},
        "algorithm": {"repeat_times": REPEAT},
        "buffer": {
            "batch_size": GROUPS,
            "train_batch_size": train_batch_size,
            "total_steps": batches,
            "explorer_input": {"taskset": {"path": str(tasks)}},
            "trainer_input": {"experience_buffer": {"replay_buffer": replay or {}}},
        },
        "synchronizer": sync,
    }
    home = Home(folder / "home")
    write_text(home.config_file, yaml.safe_dump(config))
    project = Project.open(home)
    publish(project.store, Policy("v0", policy_version=0, weights_digest="d0", round=0))
    write(project.store, 0, RoundEvaluation())
    return Simulated(project)


class Simulated:
    """What the jobs of a project leave behind, phase by phase."""

    def __init__(self, project: Project) -> None:
        self.project, self.store = project, project.store

    def state(self, *running: tuple[str, int]) -> ProjectState:
        return observe(self.project, Launches(running=frozenset(running)))

    def explore(self, number: int, drops: Callable[[int], bool] = lambda row: False) -> Policy:
        """Settle the weights, and leave the rows that were sampled with them, judged; filters drop some."""
        policy = snapshot_for(self.project, number)
        rows = [
            JudgedRow(
                f"{number}-{row}", f"{number}-{row // REPEAT}", f"{number}-{row}", 0, 1.0, {}, "v", 1.0,
                "zero_variance" if drops(row) else None,
            )
            for row in range(ROWS)
        ]  # fmt: skip
        write(self.store, number, Explored(policy_version=policy.policy_version))
        self.store.write_judged(number, "v", rows)
        write(self.store, number, Judged(sound=True))
        return policy

    def settle(self, number: int) -> RowSelection:
        """First half of a training."""
        return select_rows(self.project, number, parent_of(self.store, number))

    def train(self, number: int) -> RowSelection:
        """A whole training, with its evaluation; what it had settled."""
        selection, parent = self.settle(number), parent_of(self.store, number)
        version = parent.policy_version + selection.steps
        publish(self.store, Policy(f"v{version}", version, f"d{version}", number))
        write(self.store, number, RoundEvaluation())
        return selection

    def selected(self, number: int) -> list[dict[str, Any]]:
        """Row by row what a training took."""
        return read_selection(self.store, number).to_pylist()

    def trainings(self) -> list[int]:
        return [number for number in self.store.rounds() if number and published(self.store, number)]
