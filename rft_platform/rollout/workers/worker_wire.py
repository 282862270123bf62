"""Calls of a worker process: encoding as JSON, and conversion of values to and from JSON values.

``set_up`` gets what a worker needs to load the workflow, and returns None or the reason why it cannot load it.
``attempt`` may send notes (``[number, url, why]`` of a replica that does not answer). It returns ``result`` or
``failed``, the connection statistics and ``tasks_left``: true if tasks could not be stopped, so that the process must
be replaced.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.experience.record import ModelCall
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.class_style import FormatArgs
from rft_platform.rollout.runs.run import RunResult
from rft_platform.rollout.workflow import WorkerWorkflow
from rft_platform.tasks.task import Task

_CALL_FIELDS = [item.name for item in fields(ModelCall)]
_TASK_FIELDS = [item.name for item in fields(Task)]


def json_text(value: Mapping[str, Any], what: str) -> bytes:
    """Encode an argument or a result. Raises UserError, naming ``what``, for a value that is not JSON."""
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{what} cannot be sent to a worker process: {error}; worker processes need JSON values"
        ) from error


def result_to_json(result: RunResult) -> dict[str, Any]:
    """Convert a result to plain values; floats are restored exactly."""
    calls = [{name: getattr(call, name) for name in _CALL_FIELDS} for call in result.calls]
    return {
        "calls": calls,
        "reward": result.reward,
        "response": result.response,
        "metrics": result.metrics,
        "truncated": result.truncated,
    }


def result_from_json(value: Mapping[str, Any]) -> RunResult:
    """Restore a result from the output of ``result_to_json``."""
    return RunResult(**{**value, "calls": [ModelCall(**call) for call in value["calls"]]})


def task_to_json(task: Task) -> dict[str, Any]:
    """Convert a task to plain values; its dataset row must consist of plain values."""
    return {name: getattr(task, name) for name in _TASK_FIELDS}


def workflow_to_json(workflow: WorkerWorkflow) -> dict[str, Any]:
    """Return what a worker needs to load the workflow."""
    return {
        "name": workflow.name,
        "arguments": dict(workflow.arguments),
        "format_args": asdict(workflow.format_args),
        "reward_fn_args": dict(workflow.reward_fn_args),
    }


def workflow_arguments(value: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the output of ``workflow_to_json`` to arguments of ``resolve_workflow``."""
    return {**value, "format_args": FormatArgs(**value["format_args"])}


def sampling_from_json(value: Mapping[str, Any]) -> SamplingParams:
    """Restore sampling parameters from the output of ``dataclasses.asdict``."""
    return SamplingParams(**{**value, "stop": tuple(value["stop"])})
