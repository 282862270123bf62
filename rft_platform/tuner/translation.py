"""Translate the arguments of ``tune()`` to the platform's configuration.

There are three layers of settings: defaults, the YAML file, and the caller's arguments. Each is a nested mapping. Later
layers override earlier ones. The user's functions become references, by which an experiment can be shown, resumed and
judged without the script.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.user_code import is_live, keep_alive, load_object, reference_of
from rft_platform.config.foreign.treatments import value_at
from rft_platform.config.load import build_config, read_settings
from rft_platform.config.paths import resolve_paths
from rft_platform.config.schema.explorer import AUTO_PARSER
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.judging.execution.agentscope_metrics import is_metric
from rft_platform.judging.types import check_judge_function
from rft_platform.rollout.workflow import check_workflow_function
from rft_platform.tuner.result import ExperimentPaths, experiment_paths
from rft_platform.tuner.sections import (
    AlgorithmConfig,
    DatasetConfig,
    TunerModelConfig,
    TunerSection,
    check_argument_types,
)


@dataclass(frozen=True, slots=True)
class TunedFunctions:
    """References to workflow and judge, as a configuration stores them."""

    workflow: str
    judge: str | None  # None: the workflow sets the reward

    @property
    def notice(self) -> str | None:
        """A message about what is not possible, if other processes cannot import the functions; otherwise None."""
        live = [reference for reference in (self.workflow, self.judge) if reference is not None and is_live(reference)]
        if not live:
            return None
        names = " and ".join(reference.rpartition("/")[2] for reference in live)
        return (
            f"no other process can import {names} by name, so this experiment cannot be resumed or judged again from "
            "the UI or `rft run`: for this, define each function at the top level of a module or a script"
        )


def tuned_functions(workflow: Callable[..., Any], judge: Callable[..., Any] | None) -> TunedFunctions:
    """Return references to both functions. Raises ``ValueError`` if the parameters of a function are not accepted."""
    if not callable(workflow):
        raise ValueError(f"workflow_func is {workflow!r}; expected a function of task and model")
    check_workflow_function(workflow)
    if judge is None:
        return TunedFunctions(_reference(workflow, "workflow"), None)
    if not callable(judge):
        raise ValueError(f"judge_func is {judge!r}; expected a function of task and response")
    if not is_metric(judge):
        check_judge_function(judge)
    return TunedFunctions(_reference(workflow, "workflow"), _reference(judge, "judge"))


def _reference(value: Any, what: str) -> str:
    """Return the name of ``value`` if importing this name gives the same object; else keep ``value`` in memory.

    The reference to an object in memory is valid only in this process.
    """
    try:
        reference = reference_of(value)
        found = load_object(reference, what)
    except UserError:
        return keep_alive(value, what)
    return reference if found is value else keep_alive(value, what)


Layer = dict[str, Any]


def nested(values: Mapping[str, Any]) -> Layer:
    """Convert dotted keys to nested mappings: ``{"model.top_p": 1}`` becomes ``{"model": {"top_p": 1}}``."""
    layer: Layer = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        section = layer
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return layer


def merged(*layers: Mapping[str, Any]) -> Layer:
    """Merge layers into one: mappings key by key; any other value replaces the earlier one."""
    result: Layer = {}
    for layer in layers:
        for key, value in layer.items():
            known = result.get(key)
            if isinstance(known, dict) and isinstance(value, Mapping):
                result[key] = merged(known, value)
            else:
                result[key] = deepcopy(value)
    return result


_SERVING = {
    "enable_thinking": "enable_thinking",
    "tensor_parallel_size": "tensor_parallel_size",
    "inference_engine_num": "engine_num",
    "tool_call_parser": "tool_call_parser",
    "reasoning_parser": "reasoning_parser",
}
_MODEL = {
    "model_path": "model.model_path",
    "max_model_len": "model.max_model_len",
    "temperature": "model.temperature",
    "top_p": "model.top_p",
    "max_tokens": "model.max_response_tokens",
    **{field: f"explorer.rollout_model.{key}" for field, key in _SERVING.items()},
}
_AUXILIARY = {
    "model_path": "model_path",
    "max_model_len": "max_model_len",
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_response_tokens",
    **_SERVING,
}
_ALGORITHM = {
    "algorithm_type": "algorithm.algorithm_type",
    "learning_rate": "algorithm.optimizer.lr",
    "group_size": "algorithm.repeat_times",
    "batch_size": "buffer.batch_size",
    "save_interval_steps": "trainer.keep_every",
    "eval_interval_steps": "explorer.eval_interval",
}
_TASKSET = {"path": "path", "name": "subset_name", "split": "split"}
_LENGTH = {"total_epochs": "buffer.total_epochs", "total_steps": "buffer.total_steps"}

_NEWEST_KEPT = 2  # newest checkpoints to keep: the policy that explores and its parent
_RUNS_AT_ONCE = 32  # concurrent runs per engine: many, because a run mostly waits for the model
_PACK_TOKENS = 16384
_INPUT_KEY = "buffer.explorer_input"
_TASKSET_KEY = f"{_INPUT_KEY}.taskset"
_EVAL_KEY = f"{_INPUT_KEY}.eval_tasksets"
_JUDGED_BY = ("judge", "judge_args", "reward_fn_args", "format")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneArguments:
    """All arguments of ``tune()`` except the functions."""

    train_dataset: DatasetConfig | None = None
    eval_dataset: DatasetConfig | None = None
    model: TunerModelConfig | None = None
    auxiliary_models: Mapping[str, TunerModelConfig] | None = None
    algorithm: AlgorithmConfig | None = None
    project_name: str | None = None
    experiment_name: str | None = None
    monitor_type: str | None = None
    config_path: str | None = None

    def check_types(self) -> None:
        """Raise UserError for an argument that is not an object of its documented class."""
        if not isinstance(self.auxiliary_models, Mapping | None):
            raise UserError(
                f"tune: auxiliary_models is {self.auxiliary_models!r}; expected a name for each model: "
                "{'judge': TunerModelConfig(model_path=...)}"
            )
        auxiliary = {f"auxiliary_models[{name!r}]": model for name, model in (self.auxiliary_models or {}).items()}
        check_argument_types(
            train_dataset=(self.train_dataset, DatasetConfig),
            eval_dataset=(self.eval_dataset, DatasetConfig),
            model=(self.model, TunerModelConfig),
            algorithm=(self.algorithm, AlgorithmConfig),
            **{name: (model, TunerModelConfig) for name, model in auxiliary.items()},
        )

    @property
    def notice(self) -> str | None:
        """A note about arguments that have no effect, or None."""
        written = set() if self.eval_dataset is None else self.eval_dataset.model_fields_set & set(_LENGTH)
        if not written:
            return None
        return f"eval_dataset: {' and '.join(sorted(written))} changes nothing: an evaluation runs every task"


def translate(arguments: TuneArguments, functions: TunedFunctions) -> tuple[RftConfig, ExperimentPaths]:
    """Return the configuration to run and the location of its experiment. Raises UserError if something is missing."""
    path = None if arguments.config_path is None else Path(arguments.config_path).absolute()
    file, notices = ({}, ()) if path is None else _file_layer(path, arguments)
    _require(arguments, file)
    file = _without_arguments(file, functions)
    wanted = merged(_settings(arguments, defaults=True), file, _settings(arguments, defaults=False))
    paths = experiment_paths(
        value_at(file, "checkpoint_root_dir"),
        arguments.project_name or value_at(file, "project"),
        arguments.experiment_name or value_at(file, "name"),
    )
    data = merged(wanted, _fixed(wanted, arguments, functions, paths))
    return build_config(resolve_paths(data, Path.cwd()), "tune", notices), paths


def _file_layer(file: Path, arguments: TuneArguments) -> tuple[Layer, tuple[str, ...]]:
    """Return the keys that a YAML file sets, without any defaults, and lines about keys without effect."""
    data, notices = read_settings(file, own_functions=True)
    if arguments.train_dataset is not None and value_at(data, _TASKSET_KEY):
        data = merged(nested({f"{_TASKSET_KEY}.path": arguments.train_dataset.path}), data)  # optional in a file
    return build_config(data, str(file)).model_dump(mode="json", exclude_unset=True), notices


def _without_arguments(file: Layer, functions: TunedFunctions) -> Layer:
    """The file's keys without the arguments of its own workflow and judge, where the call's functions replace these."""
    dropped = {"workflow_args"} if functions.judge is None else {"workflow_args", "judge_args", "reward_fn_args"}

    def kept(taskset: Mapping[str, Any]) -> Layer:
        return {key: value for key, value in taskset.items() if key not in dropped}

    inputs = dict(value_at(file, _INPUT_KEY) or {})
    if inputs.get("taskset"):
        inputs["taskset"] = kept(inputs["taskset"])
    if inputs.get("eval_tasksets"):
        inputs["eval_tasksets"] = [kept(taskset) for taskset in inputs["eval_tasksets"]]
    if not inputs:
        return file
    return {**file, "buffer": {**file["buffer"], "explorer_input": inputs}}


def _require(arguments: TuneArguments, file: Layer) -> None:
    if arguments.model is None and not value_at(file, "model.model_path"):
        raise UserError(
            "tune: there is no model; give model=TunerModelConfig(model_path=..., max_model_len=...), or in the shell "
            "--model and --max-model-len"
        )
    if arguments.train_dataset is None and not value_at(file, f"{_TASKSET_KEY}.path"):
        raise UserError(
            "tune: there are no tasks; give train_dataset=DatasetConfig(path=...), or in the shell --dataset"
        )
    mode = value_at(file, "mode")
    if mode not in (None, "both"):
        raise UserError(
            f"{arguments.config_path}: tune() does not support mode {mode!r}; set mode to 'both', or remove it"
        )


def _settings(arguments: TuneArguments, *, defaults: bool) -> Layer:
    """Return the keys that the arguments set, or with ``defaults`` those that they leave at their default values."""
    algorithm = arguments.algorithm if arguments.algorithm is not None else AlgorithmConfig()
    values = {
        **_fields(arguments.model, _MODEL, defaults),
        **(_fields(algorithm, _ALGORITHM, defaults)),
        **_fields(arguments.train_dataset, {f: f"{_TASKSET_KEY}.{key}" for f, key in _TASKSET.items()}, defaults),
    }
    if defaults:
        values |= {
            "trainer.max_checkpoints_to_keep": _NEWEST_KEPT,
            "explorer.runner_per_model": _RUNS_AT_ONCE,
            f"{_TASKSET_KEY}.format": _no_columns(),
        }
    return nested(values | _length(arguments.train_dataset, defaults))


def _length(dataset: DatasetConfig | None, defaults: bool) -> dict[str, Any]:
    """Return the keys for the length of the training. Epochs set by the caller override the file's steps."""
    if dataset is None:
        return {}
    values = _fields(dataset, _LENGTH, defaults)
    if not defaults and "total_epochs" in dataset.model_fields_set:
        values.setdefault(_LENGTH["total_steps"], None)
    return values


def _fields(section: TunerSection | None, keys: Mapping[str, str], defaults: bool) -> dict[str, Any]:
    """Map fields to configuration keys.

    With ``defaults`` these are the fields left at their defaults, otherwise the fields that the caller set, also to
    None.
    """
    if section is None:
        return {}
    written = section.model_fields_set
    values = {keys[name]: _value(section, name) for name in keys if (name in written) is not defaults}
    return {key: value for key, value in values.items() if not defaults or value is not None}


def _value(section: TunerSection, name: str) -> Any:
    if isinstance(section, DatasetConfig) and name == "split":
        return section.split_or_train
    if name == "reasoning_parser" and name not in section.model_fields_set:
        return AUTO_PARSER  # an engine refuses a parser for a model without an end-of-reasoning token
    return getattr(section, name)


def _fixed(wanted: Layer, arguments: TuneArguments, functions: TunedFunctions, paths: ExperimentPaths) -> Layer:
    """Return the keys that follow from all others: functions, locations, and limits that depend on each other."""
    run = {"workflow": functions.workflow}
    if functions.judge is not None:  # otherwise tasksets of the file keep their judges
        run["judge"] = functions.judge
    evaluated = value_at(wanted, _EVAL_KEY) or []
    if arguments.eval_dataset is not None:
        fields = _fields(arguments.eval_dataset, _TASKSET, True) | _fields(arguments.eval_dataset, _TASKSET, False)
        evaluated = [merged({"format": _no_columns()}, _file_judge(wanted, functions), fields)]
    values = {
        "project": paths.project,
        "name": paths.experiment,
        "checkpoint_root_dir": str(paths.root),
        "monitor.tensorboard_dir": str(paths.tensorboard),
        "evaluation.every": _evaluation_every(wanted, arguments),
        _EVAL_KEY: [merged(taskset, run) for taskset in evaluated],
        **{f"{_TASKSET_KEY}.{key}": value for key, value in run.items()},
        **_limits(wanted),
        **_step(wanted),
    }
    if arguments.monitor_type is not None:
        values["monitor.monitor_type"] = arguments.monitor_type
    if arguments.auxiliary_models is not None:
        values["explorer.auxiliary_models"] = [_auxiliary(*item) for item in arguments.auxiliary_models.items()]
    if value_at(wanted, f"{_TASKSET_KEY}.rollout_args.n") is not None:  # the same setting as repeat_times
        values[f"{_TASKSET_KEY}.rollout_args.n"] = value_at(wanted, "algorithm.repeat_times")
    return nested(values)


def _evaluation_every(wanted: Layer, arguments: TuneArguments) -> int:
    """Rounds between evaluations: the value of the file, unless the caller sets ``eval_interval_steps``."""
    known = value_at(wanted, "evaluation.every")
    if known is not None and not (
        arguments.algorithm and "eval_interval_steps" in arguments.algorithm.model_fields_set
    ):
        return int(known)
    fixed = value_at(wanted, "synchronizer.sync_style") in (None, "fixed")
    batches_a_round = (value_at(wanted, "synchronizer.sync_interval") or 1) if fixed else 1
    return max(1, math.ceil(value_at(wanted, "explorer.eval_interval") / batches_a_round))


def _file_judge(wanted: Layer, functions: TunedFunctions) -> Layer:
    """The keys of the training taskset by which ``eval_dataset`` is judged, if the caller gives no judge."""
    names = () if functions.judge is not None else _JUDGED_BY
    return {name: value for name in names if (value := value_at(wanted, f"{_TASKSET_KEY}.{name}")) is not None}


def _step(wanted: Layer) -> dict[str, Any]:
    """Make one optimiser step per round, for any number of model calls, unless the file sets another step size."""
    counts_rows = (
        value_at(wanted, "buffer.train_batch_size") is not None
        or value_at(wanted, "synchronizer.sync_style") not in (None, "fixed")
        or value_at(wanted, "buffer.trainer_input.experience_buffer.replay_buffer.enable")
        or value_at(wanted, "algorithm.algorithm_type") == "mix"
    )
    return {} if counts_rows else {"buffer.train_batch_size": "round"}


def _limits(wanted: Layer) -> dict[str, Any]:
    length, answer = value_at(wanted, "model.max_model_len"), value_at(wanted, "model.max_response_tokens")
    limits: dict[str, Any] = {}
    if length and answer:
        prompt = value_at(wanted, "model.max_prompt_tokens") or 1
        limits["model.max_response_tokens"] = max(1, min(answer, length - prompt))
    if length and length > (value_at(wanted, "trainer.max_token_len_per_gpu") or _PACK_TOKENS):
        limits["trainer.max_token_len_per_gpu"] = length
    return limits


def _auxiliary(name: str, model: TunerModelConfig) -> Layer:
    fields = _fields(model, _AUXILIARY, True) | _fields(model, _AUXILIARY, False)
    fields["max_response_tokens"] = min(model.max_tokens, max(1, model.max_model_len - 1))
    return {"name": name, **fields}


def _no_columns() -> Layer:
    return {"prompt_key": None, "response_key": None}
