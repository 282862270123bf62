"""An opened project: its folder, configuration, store and tasks."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_json
from rft_platform.common.policy_names import stored_name
from rft_platform.config.gpu_placement import gpu_count
from rft_platform.config.home import Home
from rft_platform.config.load import load_config_of
from rft_platform.config.memory_plan import MemoryChoice, choose_memory, gpu_bytes
from rft_platform.config.node_placement import gpus_of
from rft_platform.config.resolve import Batches, PolicySettings, RunLength, RunSettings, policies_of, resolve
from rft_platform.config.schema.buffer import REASONING_GYM, ExploredTaskset, Taskset
from rft_platform.config.schema.rft_config import Mode, RftConfig
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.traffic_source import TrafficSource

if TYPE_CHECKING:
    from rft_platform.cluster.interface import Cluster
    from rft_platform.tasks.dataset import TaskDataset


@dataclass(frozen=True)
class Project:
    """The argument that every stage of a round starts from."""

    home: Home
    config: RftConfig

    @classmethod
    def open(cls, home: Home) -> Self:
        """The project that was started in ``home``. Raises UserError if there is none."""
        if not home.config_file.exists():
            raise UserError(
                f"no project in {home.root}: start one with `rft run --config rft.yaml` or `rft demo`, "
                "or set RFT_HOME to the folder of one"
            )
        return cls(home, _load_config_once(home, home.config_file.stat().st_mtime_ns))

    def in_mode(self, mode: Mode) -> Self:
        """This project with ``mode`` in its configuration, for a driver whose mode is not that of the stored file."""
        return self if mode == self.config.mode else replace(self, config=self.config.model_copy(update={"mode": mode}))

    @cached_property
    def traffic(self) -> TrafficSource | None:
        """The production traffic of an online project; None for a project that explores tasks."""
        if self.config.online:
            raise TypeError("an online project is opened with rft_platform.online.project.open_project")
        return None

    @cached_property
    def store(self) -> ExperienceStore:
        """The rows of all rounds."""
        return ExperienceStore(self.home.rounds)

    @property
    def checkpoints(self) -> Path:
        """``<checkpoint_root_dir>/<project>/<name>``.

        It is below the home if ``checkpoint_root_dir`` is an object store, which then holds copies.
        """
        root = self.config.checkpoint_folder
        return (Path(root) if root else self.home.checkpoints) / self.config.project / self.config.name

    def checkpoints_of(self, policy: str) -> Path:
        """Folder of the checkpoints of a policy."""
        return Path(stored_name(str(self.checkpoints), policy, "/"))

    @property
    def warm_start_checkpoints(self) -> Path:
        """Folder of the checkpoints that the warm start makes on its way to the starting policy."""
        return self.checkpoints / "warm_start"

    @property
    def model_name(self) -> str:
        """Name of the registered model."""
        return self.config.registry.model_name or f"{self.config.project}-{self.config.name}"

    @cached_property
    def tasksets(self) -> dict[str, ExploredTaskset]:
        """The tasksets to explore, by name; an empty one for an online project without tasks.

        Raises UserError if none is set.
        """
        explored = list(self.config.buffer.explorer_input.explored.values())
        if not explored and self.traffic is not None:  # production traffic; feedback gives the rewards
            explored = [ExploredTaskset(path="", name="online", judge=None)]
        if not explored:
            raise UserError("buffer.explorer_input.taskset is not set: name the dataset to explore")
        return {taskset.known_as: taskset for taskset in explored}

    @cached_property
    def datasets(self) -> dict[str, "TaskDataset"]:
        """The tasks of each taskset to explore, by name; none in an online project."""
        if self.traffic is not None:
            return dict.fromkeys(self.tasksets, _no_tasks())
        loaded = {name: load_taskset(taskset) for name, taskset in self.tasksets.items()}
        return loaded if len(loaded) == 1 else _with_unique_tasks(loaded)

    @cached_property
    def tasks(self) -> "TaskDataset":
        """The tasks of all tasksets to explore."""
        first, *others = self.datasets.values()
        if not others:
            return first
        every = [first, *others]
        tasks = tuple(task for dataset in every for task in dataset.tasks)
        return replace(first, tasks=tasks, digest=digest_json([dataset.digest for dataset in every]))

    @cached_property
    def eval_tasks(self) -> list[tuple[Taskset, "TaskDataset"]]:
        """The held-out tasks, each with the taskset that defines how they are run and judged."""
        return [(taskset, load_taskset(taskset)) for taskset in self.config.buffer.explorer_input.eval_tasksets]

    @cached_property
    def policies(self) -> dict[str, PolicySettings]:
        """The policies by name, the first one first."""
        return policies_of(self.config)

    @cached_property
    def settings(self) -> RunSettings:
        """All settings derived from the configuration."""
        return resolve(self.config)

    @cached_property
    def memory(self) -> MemoryChoice:
        """The settings that decide about GPU memory on this machine."""
        here = self.config.cluster.kind == "local"
        return choose_memory(self.settings, self.gpus, gpu_bytes() if here and self.gpus else None)

    @cached_property
    def cluster(self) -> "Cluster":
        """What runs engines, trainer and workers, as the configuration names it."""
        return self.home.cluster_at(self.config.cluster.ray)

    @cached_property
    def gpus(self) -> int:
        """Number of GPUs for engines and trainer: of this machine, or of all nodes of the cluster."""
        if self.config.cluster.kind == "local":
            return gpu_count()
        return gpus_of(self.cluster.nodes())

    @property
    def batches(self) -> Batches:
        """Batch sizes from tasks to experiences to optimiser steps."""
        return self.settings.batches

    @cached_property
    def length(self) -> RunLength:
        """Rounds and optimiser steps of the whole run; reads the tasks if it depends on their number."""
        length = self.settings.length() or self.settings.length(len(self.tasks.tasks))
        assert length is not None  # only an unknown number of tasks gives None, and the tasks were read
        return length

    @property
    def rounds_budget(self) -> int:
        """Rounds of the whole run; 1 for an offline training, 0 in mode bench, which may have no tasks to explore."""
        if self.config.mode == "bench":
            return 0
        return 1 if self.settings.offline is not None else self.length.rounds


def _with_unique_tasks(datasets: dict[str, "TaskDataset"]) -> dict[str, "TaskDataset"]:
    """Give a task that is also in an earlier taskset another id: each taskset has its own workflow and judge."""
    seen: set[str] = set()
    found = {}
    for name, dataset in datasets.items():
        tasks = [
            replace(task, task_id=digest_json([task.task_id, name])[:16]) if task.task_id in seen else task
            for task in dataset.tasks
        ]
        seen |= {task.task_id for task in tasks}
        found[name] = replace(dataset, tasks=tuple(tasks))
    return found


def _no_tasks() -> "TaskDataset":
    from rft_platform.tasks.dataset import DatasetReport, TaskDataset

    return TaskDataset((), "online", DatasetReport("production traffic"))


@lru_cache(maxsize=4)
def _load_config_once(home: Home, _changed_ns: int) -> RftConfig:
    return load_config_of(home)


def load_taskset(taskset: Taskset) -> "TaskDataset":
    """Read the dataset of a taskset; an unchanged dataset is read once per process."""
    wanted = taskset.model_dump_json(include={"path", "name", "split", "subset_name", "format", "limit"})
    return _load_once(wanted, stamps(Path(taskset.path)))


@lru_cache(maxsize=16)
def _load_once(taskset_json: str, _stamps: tuple[tuple[str, int, int], ...]) -> "TaskDataset":
    from rft_platform.tasks.dataset import load_tasks

    taskset = Taskset.model_validate_json(taskset_json)
    return load_tasks(
        taskset.path,
        name=taskset.name,
        split=taskset.split,
        subset_name=taskset.subset_name,
        prompt_key=taskset.format.prompt_key,
        response_key=taskset.format.response_key,
        limit=taskset.limit,
    )


def stamps(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and modification time of the files behind a path; empty for a name of the hub or of reasoning-gym."""
    if str(path).startswith(REASONING_GYM):  # with its options it may be too long for a file's name
        return ()
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.is_file() else []
    found = []
    for file in files:
        with suppress(OSError):  # a link to nothing, as editors make as locks, or to itself; or removed meanwhile
            stat = file.stat()
            found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return tuple(found)
