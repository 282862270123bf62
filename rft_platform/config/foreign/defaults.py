"""Defaults of Trinity-RFT that differ from ours. They are written out in a file that is recognised as one of its."""

from collections.abc import Iterator, Mapping
from typing import Any

from rft_platform.config.foreign.convert import INPUT, convert, sign_of_other_system, tasksets
from rft_platform.config.foreign.treatments import Data, mapping_at, put, value_at

_OF_TRAINING: Mapping[str, Any] = {"algorithm.algorithm_type": "ppo", "algorithm.optimizer.weight_decay": 0.01}
_OF_WARM_START: Mapping[str, Any] = {"warm_start.optimizer.weight_decay": 0.01}
_OF_TASKS: Mapping[str, Any] = {"buffer.batch_size": 1}
_OF_FORMAT: Mapping[str, Any] = {"prompt_key": "prompt", "response_key": "response"}


def convert_with_defaults(data: Data, source: str) -> tuple[Data, tuple[str, ...]]:
    """``convert``; in a file of Trinity-RFT, what is left out gets the default of Trinity-RFT. Raises UserError."""
    converted, notices = convert(data, source)
    if sign := sign_of_other_system(data, converted):
        lines = write_defaults(converted, staged=bool(data.get("stages")))
        notices += tuple(f"{line}, taken because the file has {sign}" for line in lines)
    return converted, notices


def write_defaults(data: Data, *, staged: bool) -> Iterator[str]:
    """Set the keys of a converted file that it leaves out and whose default differs; yields one line for each.

    ``staged``: section ``warm_start`` is a stage of the file.
    """
    inputs = mapping_at(data, INPUT)  # not the mode, which a started project may change, while it keeps these settings
    yield from _write(data, _OF_TRAINING)
    if staged and isinstance(data.get("warm_start"), dict):
        yield from _write(data, _OF_WARM_START)
    if inputs.get("taskset") or inputs.get("tasksets"):
        yield from _write(data, _OF_TASKS)
    for shown, taskset, _ in tasksets(inputs, None, None):
        yield from _write_columns(shown, taskset)


def _write(data: Data, defaults: Mapping[str, Any]) -> Iterator[str]:
    for key, value in defaults.items():
        if value_at(data, key) is None:
            put(data, key, value, key)
            if value_at(data, key) == value:  # else a section of it is no section, which the validation refuses
                yield _line(key, value)


def _write_columns(shown: str, taskset: Data) -> Iterator[str]:
    """Name the columns of a taskset; a column that is null is kept, since the workflow reads the whole row."""
    if taskset.get("format") is None:
        taskset["format"] = {}
    form = taskset["format"]
    for key, value in _OF_FORMAT.items() if isinstance(form, dict) else ():
        if key not in form:
            form[key] = value
            yield _line(f"{shown}.format.{key}", value)


def _line(key: str, value: Any) -> str:
    return f"{key} is not set: it is {value}, the default of Trinity-RFT"
