"""A worker process: loads the workflow once (``set_up``), then makes the attempts that the parent requests.

It may use the interpreter of another environment, which needs ``openai`` and the workflow's imports in addition to the
standard library. Output of user code is written to the log.
"""

import asyncio
import logging
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, cast

from rft_platform.cluster.child_main import note
from rft_platform.common.errors import EngineError, RftError, UserError
from rft_platform.common.fault_classification import described, user_place
from rft_platform.common.threads import DaemonThreads, UserCodeLoop
from rft_platform.common.user_code import drop_safe_path
from rft_platform.inference.interface import greedy
from rft_platform.inference.pool.replicas import Replica, Replicas
from rft_platform.observability.masked_output import mask_output
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.policy_routes import PolicyRoute
from rft_platform.rollout.runs.attempt import AttemptStatistics, end_other_tasks, make_attempt
from rft_platform.rollout.runs.run import RunResult
from rft_platform.rollout.workers.worker_wire import (
    json_text,
    result_to_json,
    sampling_from_json,
    workflow_arguments,
)
from rft_platform.rollout.workflow import LocalWorkflow, resolve_workflow
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel, AuxiliarySpec
from rft_platform.tasks.task import Task


class _Address:
    """Address of a replica."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url, self.api_key = url, api_key


class WorkerReplicas(Replicas):
    """The replicas that the parent named for an attempt; the first of them is the one that the parent chose."""

    def __init__(self) -> None:
        super().__init__([], {})

    def set(self, addresses: Iterable[tuple[int, str, str]]) -> None:
        """Make these replicas active."""
        self.reset([Replica(number, cast(Any, _Address(url, key))) for number, url, key in addresses])

    def mark_down(self, replica: Replica, why: str) -> None:
        """Mark a replica that does not answer as down, and report it to the parent, which restarts it."""
        super().mark_down(replica, why)
        note([replica.number, replica.url, why])


_worker: "Worker"


def set_up(setup: Mapping[str, Any]) -> str | None:
    """Load the workflow; return None, or why it cannot be loaded."""
    global _worker
    mask_output()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    try:
        _worker = Worker(setup)
    except BaseException as error:  # user code is imported here
        traceback.print_exc()
        return str(error) if isinstance(error, RftError) else described(error)
    return None


def attempt(request: Mapping[str, Any]) -> bytes:
    """Make an attempt; return the answer as JSON text."""
    answer = _worker.attempt(request)
    try:
        return json_text(answer, "what the workflow returned")
    except UserError as error:  # the workflow may have put values that are not JSON into its calls
        return json_text({**answer, **_failed(error)} | {"result": None}, "the failure")


class Worker:
    """Holds the workflow and the engine's clients across attempts."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Raises UserError if the workflow cannot be loaded, ImportError if the environment lacks a package."""
        drop_safe_path()
        sys.path += [folder for folder in setup["sys_path"] if folder not in sys.path]
        from rft_platform.rollout.recording.clients import RecordingClients  # imports openai

        self._workflow: LocalWorkflow = resolve_workflow(**workflow_arguments(setup["workflow"]))
        self._auxiliary = {
            name: AuxiliaryModel(AuxiliarySpec.from_json(spec)) for name, spec in setup["auxiliary_models"].items()
        }
        self._policies = {name: PolicyRoute(**route) for name, route in setup["policies"].items()}
        self._replicas = WorkerReplicas() if setup["replicated"] else None
        self._clients = RecordingClients(setup["base_url"], setup["timeout_s"], self._replicas, setup["api_key"])
        self._model, self._truncated_reward = setup["model"], setup["truncated_reward"]
        self._sampling = sampling_from_json(setup["sampling"])
        self._tasks_left = False  # True if tasks could not be stopped: the parent then replaces this process
        # one loop for all attempts: clients that libraries cache are bound to a loop
        self._loop = asyncio.Runner(loop_factory=UserCodeLoop)

    def attempt(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Make an attempt and return the answer for the parent."""
        statistics = AttemptStatistics()
        if self._replicas is not None:
            self._replicas.set(tuple(address) for address in request["replicas"])
        try:
            result = self._loop.run(self._attempt(request, statistics))
            outcome = {"result": result_to_json(result)}
        except BaseException as error:  # the process makes one attempt at a time, so only this attempt fails
            traceback.print_exc()
            outcome = _failed(error)
        return {
            **outcome,
            "client_retries": statistics.client_retries,
            "connection_lost": statistics.connection_lost,
            "tasks_left": self._tasks_left,
        }

    async def _attempt(self, request: Mapping[str, Any], statistics: AttemptStatistics) -> RunResult:
        asyncio.get_running_loop().set_default_executor(DaemonThreads("workflow"))
        task = Task(**request["task"])
        sampling = greedy(self._sampling) if request["greedy"] else self._sampling
        history = RunHistory(self._model, sampling, request["seed"], request["key"], self._policies)
        try:
            return await make_attempt(
                self._workflow, task, self._clients, history, self._auxiliary, self._truncated_reward, statistics
            )
        finally:
            self._tasks_left = not await end_other_tasks()


def _failed(error: BaseException) -> dict[str, Any]:
    return {
        "failed": {"error": described(error), "location": user_place(error), "engine": isinstance(error, EngineError)}
    }
