"""Convert section ``stages`` of foreign files, a supervised fine-tuning and the training after it, to one project.

The fine-tuning becomes section ``warm_start`` (round 0), and the sections of the other stage replace those of the file.
"""

from collections.abc import Generator, Iterator
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.config.foreign.algorithms import warm_up
from rft_platform.config.foreign.keys import KEYS
from rft_platform.config.foreign.treatments import Data, apply, mapping_at, put, value_at

_SECTIONS = ("mode", "algorithm", "buffer", "data_processor", "explorer", "trainer")
_MORE = "run each further one as its own project, with model_path: models:/NAME@champion of the one before"
_STORE = "buffer.trainer_input.experience_buffer"
_OPTIMIZER = "algorithm.optimizer"
_COLUMNS = {"messages_key": "messages", "tools_key": "tools"}  # the columns that a warm start reads
_USED = (
    "stage_name",
    "mode",
    "algorithm.algorithm_type",
    *(f"buffer.{key}" for key in ("train_batch_size", "total_epochs", "total_steps")),
    *(f"trainer.{key}" for key in ("total_steps", "grad_clip")),
    *(f"{_STORE}.{key}" for key in ("name", "storage_type", "path", "split", "subset_name")),
    *(f"{_STORE}.format.{key}" for key in ("prompt_type", "prompt_key", "response_key", "system_prompt", *_COLUMNS)),
)


def convert_stages(data: Data) -> Iterator[str]:
    """Merge the stages into the file; yields one line for each difference.

    Raises UserError unless the stages are one training, or a supervised fine-tuning followed by one training.
    """
    stages = data.pop("stages", None)
    if not stages:
        return
    _check(stages)
    *first, last = stages
    if len(first) > 1 or (first and _algorithm(first[0]) != "sft"):
        raise UserError(f"stages: a project has an optional stage of sft and one stage after it; {_MORE}")
    if first:
        if _algorithm(last) == "sft":
            raise UserError(f"stages: both are sft; {_MORE}")
        if data.get("warm_start") is not None:
            raise UserError("stages: the stage of sft and section warm_start are the same training: leave one out")
        names = [str(stage.get("stage_name", number)) for number, stage in enumerate(stages)]
        yield f"stages: {names[0]} is the warm start (round 0) of the project, and {names[1]} its rounds"
        data["warm_start"] = yield from _warm_start(first[0], data)
    for name in _SECTIONS:
        if last.get(name) is not None:
            data[name] = last[name]


def _check(stages: Any) -> None:
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise UserError("stages: expected a list of stages, each with stage_name and sections")
    unknown = sorted({str(key) for stage in stages for key in stage} - {"stage_name", *_SECTIONS})
    if unknown:
        raise UserError(f"stages: unknown key {unknown[0]}; a stage has stage_name, {', '.join(_SECTIONS)}")
    for number, stage in enumerate(stages):
        for name in set(_SECTIONS) - {"mode"}:
            if not isinstance(stage.get(name), dict | None):
                raise UserError(f"stages[{number}].{name}: got {stage[name]!r}; expected a section with indented keys")


def _algorithm(stage: Data) -> Any:
    return value_at(stage, "algorithm.algorithm_type")


def _warm_start(stage: Data, data: Data) -> Generator[str, None, Data]:
    """Section ``warm_start`` with the settings of a stage of sft.

    If the stage has no section ``buffer`` or ``trainer``, that section of the file is used.
    """
    for key in _leaves(stage):
        if key not in _USED and not key.startswith(f"{_OPTIMIZER}."):
            yield f"stages[0].{key} has no effect here: section warm_start has the settings of the warm start"
    stage = {name: data.get(name) for name in ("buffer", "trainer")} | {
        name: section for name, section in stage.items() if section is not None
    }
    buffer, form = mapping_at(stage, _STORE), mapping_at(stage, f"{_STORE}.format")
    for key, column in _COLUMNS.items():
        if form.get(key) not in (None, column):
            raise UserError(f"stages[0].{_STORE}.format.{key} {form[key]}: rename the column to {column}")
    section: Data = {key: buffer[key] for key in ("path", "split", "subset_name") if buffer.get(key) is not None}
    columns = {key: form[key] for key in ("prompt_key", "response_key", "system_prompt") if form.get(key) is not None}
    if columns:
        section["format"] = columns
    if (size := value_at(stage, "buffer.train_batch_size")) is not None:
        section["batch_size"] = size
    steps = value_at(stage, "trainer.total_steps") or value_at(stage, "buffer.total_steps")
    if steps is not None:
        section["steps"] = steps
    else:
        section["epochs"] = value_at(stage, "buffer.total_epochs") or 1
    yield from _optimizer(stage, section, steps)
    return section


def _optimizer(stage: Data, section: Data, steps: Any) -> Iterator[str]:
    """Convert the stage's ``algorithm.optimizer`` as that of a whole file is converted; store it in ``section``."""
    alone: Data = {"algorithm": {"optimizer": value_at(stage, _OPTIMIZER)}, "trainer": {"total_steps": steps}}
    lines: list[str] = []
    try:
        for key, treatment in KEYS:
            if key.startswith(f"{_OPTIMIZER}."):
                lines += apply(alone, key, treatment)
        lines += warm_up(alone, alone["algorithm"])
        if (clip := value_at(stage, "trainer.grad_clip")) is not None:
            put(alone, f"{_OPTIMIZER}.clip_grad", clip, f"trainer.grad_clip and {_OPTIMIZER}.clip_grad")
    except UserError as error:
        raise UserError(f"stages[0].{error}") from None
    yield from (f"stages[0].{line}" for line in lines)
    if (optimizer := value_at(alone, _OPTIMIZER)) is not None:
        section["optimizer"] = optimizer


def _leaves(section: Data, prefix: str = "") -> Iterator[str]:
    """The dotted keys of all values that are not null."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}"
