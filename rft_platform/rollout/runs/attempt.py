"""One attempt at a run: call the workflow with a recorded model and collect the result."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserCodeError
from rft_platform.common.threads import await_user_code
from rft_platform.experience.record import UNFINISHED_METRIC
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runs.invoke_workflow import call_workflow
from rft_platform.rollout.runs.run import RunResult
from rft_platform.rollout.workflow import LocalWorkflow
from rft_platform.tasks.task import Task

if TYPE_CHECKING:
    from rft_platform.rollout.recording.clients import RecordingClients


@dataclass(slots=True)
class Connection:
    """Connection statistics of an attempt; also filled in if the attempt fails."""

    client_retries: int = 0  # HTTP requests that a client retried
    lost: bool = False  # the engine could not be reached at least once


class RemoteFailure(UserCodeError):
    """An attempt failed in a worker process; the message begins with the kind of the original error."""

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location  # ``file:line`` of the user's code


async def make_attempt(
    workflow: LocalWorkflow,
    task: Task,
    clients: "RecordingClients",
    history: RunHistory,
    auxiliary_models: Mapping[str, Any] | None,
    truncated_reward: float | None,
    connection: Connection,
) -> RunResult:
    """Call ``workflow``; close ``history`` and the run's clients in every case.

    A run whose next prompt exceeds the context ends with the calls recorded so far and ``truncated_reward`` as its
    reward; if ``truncated_reward`` is None, the attempt fails. The run counts as such only if the engine refused its
    last call for this reason; the workflow's own error message does not matter. Raises what the workflow raises.
    """
    model = ModelHandle(clients, history)
    try:
        returned = await await_user_code(call_workflow(workflow, task, model, auxiliary_models), "workflow")
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
