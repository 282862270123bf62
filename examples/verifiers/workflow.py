"""A workflow for every taskset of verifiers v1: the rollout is verifiers', its model calls are recorded."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from rft_platform.rollout.workflow import WorkflowOutput

#: Who plays a task of a taskset that brings no environment of its own: the harness of this folder, on this machine.
AGENT = {"harness": {"id": "chat_loop"}, "runtime": {"type": "subprocess"}, "max_turns": 8}


@dataclass
class VerifiersWorkflow:
    """Run task ``idx`` of a row by its taskset.

    ``taskset`` is the id of a taskset that is installed, or a module beside this file; ``taskset_args`` are the fields
    of its configuration. ``env`` has further fields of the environment's configuration, such as ``agent``.
    """

    taskset: str
    taskset_args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what verifiers refuses, before the first round. Tool servers find the modules of this folder, too."""
        places = dict.fromkeys([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parent)])
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        config = {"agent": AGENT, **self.env, "taskset": {"id": self.taskset, **self.taskset_args}}
        self._tasks: dict[int, vf.Task] = {}
        self._environment = vf.load_environment(vf.resolve_env_config(config))

    def task_of(self, row: Mapping[str, Any]) -> vf.Task:
        """The task that a row names by its position; its content must be the one that the row was written for."""
        idx = int(row["idx"])
        if idx not in self._tasks:
            self._tasks |= {task.data.idx: task for task in self._environment.taskset.skip(idx).take(1)}
        task = self._tasks.get(idx)
        if task is None or task.key != row["key"]:
            raise ValueError(f"task {idx} of {self.taskset} is not the one of this row: write the rows anew by rows.py")
        return task

    async def run(self, task: Any, model: Any, auxiliary_models: Mapping[str, Any] | None = None) -> WorkflowOutput:
        """Return verifiers' reward; metrics are the parts of the reward and verifiers' own."""
        key = f"RFT_API_KEY_{os.getpid()}"  # verifiers reads keys from variables, and hides this one from programs
        os.environ[key] = model.api_key
        client = vf.EvalClientConfig(base_url=model.base_url, api_key_var=key)
        context = vf.ModelContext(client=client, model=model.model_name, sampling=vf.SamplingConfig())
        async with self._environment.serving():
            episode = await self._environment.run_episode(self.task_of(task.raw), context)
        if not episode.ok or len(episode.traces) != 1:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"{len(episode.traces)} traces, expected 1 without errors: {errors}")
        (trace,) = episode.traces
        parts = {name: part.value for name, part in trace.rewards.items() if part is not None}
        metrics = {name: float(value) for name, value in {**trace.metrics, **parts}.items() if value is not None}
        return WorkflowOutput(trace.reward, trace.last_reply, {**metrics, "turns": float(trace.num_turns)})
