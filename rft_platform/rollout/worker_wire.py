"""What the parent and a worker process tell each other: JSON lines, and the values that cross as JSON.

Parent to worker: ``{"setup": ...}`` once, then ``{"attempt": ...}``. Worker to parent: ``{"ready": true}`` or
``{"refused": reason}`` once; for each attempt any number of ``{"down": [number, url, why]}`` and one
``{"result": ...}`` or ``{"failed": ...}``, both with what was noticed of the connection.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rft_platform.errors import UserError
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.class_style import FormatArgs
from rft_platform.rollout.history import RecordedCall
from rft_platform.rollout.run import RunResult
from rft_platform.rollout.workflow import WorkerWorkflow
from rft_platform.tasks.task import Task

_CALL_FIELDS = [item.name for item in fields(RecordedCall)]
_TASK_FIELDS = [item.name for item in fields(Task)]


def line(message: Mapping[str, Any], what: str) -> bytes:
    """A message as it goes over the socket; UserError naming ``what`` for a value that is not JSON."""
    try:
        return json.dumps(message).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{what} cannot be handed to a worker process: {error}; worker processes take JSON values"
        ) from error


def result_to_json(result: RunResult) -> dict[str, Any]:
    """A result as plain values; floats come back exactly."""
    calls = [{name: getattr(call, name) for name in _CALL_FIELDS} for call in result.calls]
    return {
        "calls": calls,
        "reward": result.reward,
        "response": result.response,
        "metrics": result.metrics,
        "truncated": result.truncated,
    }


def result_from_json(value: Mapping[str, Any]) -> RunResult:
    """What ``result_to_json`` wrote."""
    return RunResult(**{**value, "calls": [RecordedCall(**call) for call in value["calls"]]})


def task_to_json(task: Task) -> dict[str, Any]:
    """A task as plain values, if its row is made of such."""
    return {name: getattr(task, name) for name in _TASK_FIELDS}


def workflow_to_json(workflow: WorkerWorkflow) -> dict[str, Any]:
    """What a worker needs to load the workflow."""
    return {
        "name": workflow.name,
        "arguments": dict(workflow.arguments),
        "format_args": asdict(workflow.format_args),
        "reward_fn_args": dict(workflow.reward_fn_args),
    }


def workflow_arguments(value: Mapping[str, Any]) -> dict[str, Any]:
    """What ``workflow_to_json`` wrote, as arguments of ``resolve_workflow``."""
    return {**value, "format_args": FormatArgs(**value["format_args"])}


def sampling_from_json(value: Mapping[str, Any]) -> SamplingParams:
    """What ``dataclasses.asdict`` made of sampling parameters."""
    return SamplingParams(**{**value, "stop": tuple(value["stop"])})


def package_folder() -> Path:
    """The folder of this package, for a process whose environment does not have it."""
    import rft_platform

    return Path(rft_platform.__file__).parent
