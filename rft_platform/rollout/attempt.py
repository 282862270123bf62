"""One attempt at a run: the workflow is called with a recorded model, and what it came to is kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rft_platform.rollout.calling import call_workflow, contained
from rft_platform.rollout.context_limit import outgrew_context
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
    ``truncated_reward`` (None: it fails like any other). Raises what the workflow raises.
    """
    model = ModelHandle(clients, history)
    try:
        returned = await contained(call_workflow(workflow, task, model, auxiliary_models))
        return RunResult.of(returned, history.calls())
    except Exception as error:
        calls = history.calls()
        too_long = history.context_exceeded or outgrew_context(error)
        if truncated_reward is None or not too_long or not calls:
            raise
        return RunResult.cut_off(calls, truncated_reward)
    finally:
        history.close()
        await model.aclose()
        connection.client_retries, connection.lost = history.client_retries, history.connection_lost
