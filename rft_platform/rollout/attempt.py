"""One attempt at a run: the workflow is called with a recorded model, and what it came to is kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rft_platform.experience.record import UNFINISHED_METRIC
from rft_platform.rollout.calling import call_workflow, contained
from rft_platform.rollout.history import RunHistory
from rft_platform.rollout.model_handle import ModelHandle
from rft_platform.rollout.run import RunResult
from rft_platform.rollout.workflow import LocalWorkflow
from rft_platform.tasks.task import Task

if TYPE_CHECKING:
    from rft_platform.rollout.recording import RecordingClients


@dataclass(slots=True)
class Connection:
    """What an attempt noticed of its connection, whether it succeeded or not."""

    client_retries: int = 0  # HTTP requests that a client sent again
    lost: bool = False  # the engine could not be reached at least once


async def make_attempt(
    workflow: LocalWorkflow,
    task: Task,
    clients: "RecordingClients",
    history: RunHistory,
    auxiliary_models: Mapping[str, Any] | None,
    truncated_reward: float | None,
    connection: Connection,
) -> RunResult:
    """Call ``workflow`` and close ``history`` and its clients, however it ends.

    A run whose next prompt is longer than the context ends there: what it has recorded is its result, with
    ``truncated_reward`` (None: it fails like any other). What says so is the policy's engine alone, and of the last
    call of the run: no error of the workflow's is believed. Raises what the workflow raises.
    """
    model = ModelHandle(clients, history)
    try:
        returned = await contained(call_workflow(workflow, task, model, auxiliary_models))
        result = RunResult.of(returned, history.calls(), history.policies)
    except Exception:
        calls = history.calls()
        if truncated_reward is None or not history.context_exceeded or not calls:
            raise
        result = RunResult.cut_off(calls, truncated_reward)
    finally:
        unfinished = history.unfinished_calls
        history.close()
        await model.aclose()
        connection.client_retries, connection.lost = history.client_retries, history.connection_lost
    if unfinished:
        result.metrics[UNFINISHED_METRIC] = float(unfinished)
    return result
