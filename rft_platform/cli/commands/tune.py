"""``rft tune``: ``tune()`` from the shell. A setting without an option comes from ``--config`` or has its default."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rft_platform.tuner import TunerModelConfig
    from rft_platform.tuner.sections import TunerSection

_MODEL, _ALGORITHM, _PROJECT = "Model", "Algorithm", "Project"


def _setting(text: str, panel: str | None = None) -> Any:
    """An option whose help shows no default, because ``tune()`` defines the defaults."""
    return typer.Option(help=text, rich_help_panel=panel, show_default=False)


_Judge = Annotated[
    str | None,
    typer.Option(
        help="package.module:function or file.py:function; without it the workflow's own reward is used.",
        show_default=False,
    ),
]
_Dataset = Annotated[
    str | None, typer.Option(help="Training tasks: a folder, a file or a Hugging Face name.", show_default=False)
]
_Model = Annotated[
    str | None,
    typer.Option(help="Model to train: a folder, a Hugging Face name or models:/NAME@alias.", rich_help_panel=_MODEL),
]
_Thinking = Annotated[
    bool | None,
    typer.Option(
        "--enable-thinking/--no-thinking",
        help="Switch of the chat template; default: the template's own.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
_Auxiliary = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=MODEL: another model that both functions can call; repeatable. Its context is --max-model-len.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
_Experiment = Annotated[
    str | None,
    typer.Option(
        help="Name of the experiment; an existing one is continued.", rich_help_panel=_PROJECT, show_default=False
    ),
]
_ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; options override it.", show_default=False)
]
_JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the result to this JSON file.", show_default=False)
]


def tune(
    ctx: typer.Context,
    workflow: Annotated[
        str, typer.Argument(help="The workflow: package.module:function or file.py:function.", show_default=False)
    ],
    judge: _Judge = None,
    dataset: _Dataset = None,
    subset: Annotated[
        str | None, _setting("Subset: a configuration of a Hugging Face dataset, or a folder inside --dataset.")
    ] = None,
    split: Annotated[str | None, _setting("Split of the dataset, also a slice: train[:100]. Default: train.")] = None,
    total_epochs: Annotated[int | None, _setting("Passes over the dataset.")] = None,
    total_steps: Annotated[int | None, _setting("Training steps; overrides --total-epochs.")] = None,
    eval_dataset: Annotated[str | None, _setting("Held-out tasks: a folder, a file or a Hugging Face name.")] = None,
    eval_subset: Annotated[
        str | None, _setting("Subset of --eval-dataset. Default: --subset if both options name the same dataset.")
    ] = None,
    eval_split: Annotated[str | None, _setting("Split of --eval-dataset. Default: test.")] = None,
    model: _Model = None,
    max_model_len: Annotated[int | None, _setting("Maximum tokens of prompt and answer together.", _MODEL)] = None,
    max_tokens: Annotated[int | None, _setting("Maximum tokens of an answer.", _MODEL)] = None,
    temperature: Annotated[
        float | None, _setting("Sampling temperature; training needs a value above 0.", _MODEL)
    ] = None,
    top_p: Annotated[float | None, _setting("Nucleus sampling; training needs 1.0.", _MODEL)] = None,
    enable_thinking: _Thinking = None,
    tensor_parallel_size: Annotated[int | None, _setting("GPUs per engine (vLLM).", _MODEL)] = None,
    inference_engine_num: Annotated[int | None, _setting("Number of engines.", _MODEL)] = None,
    tool_call_parser: Annotated[str | None, _setting("Format of tool calls in an answer.", _MODEL)] = None,
    reasoning_parser: Annotated[str | None, _setting("Format of reasoning in an answer.", _MODEL)] = None,
    auxiliary: _Auxiliary = None,
    algorithm: Annotated[
        str | None, _setting("Algorithm that learns from rewards, such as multi_step_grpo.", _ALGORITHM)
    ] = None,
    learning_rate: Annotated[float | None, _setting("Learning rate of the optimiser.", _ALGORITHM)] = None,
    group_size: Annotated[int | None, _setting("Runs per task; they are compared with each other.", _ALGORITHM)] = None,
    batch_size: Annotated[int | None, _setting("Tasks per step.", _ALGORITHM)] = None,
    save_interval_steps: Annotated[
        int | None, _setting("Steps between checkpoints that keep their weights.", _ALGORITHM)
    ] = None,
    eval_interval_steps: Annotated[int | None, _setting("Steps between evaluations.", _ALGORITHM)] = None,
    project: Annotated[str | None, _setting("Name of the project.", _PROJECT)] = None,
    experiment: _Experiment = None,
    monitor: Annotated[str | None, _setting("Where metrics go: tensorboard, mlflow, wandb or swanlab.")] = None,
    config: _ConfigFile = None,
    json_file: _JsonFile = None,
) -> None:
    """Train a model on the runs of an agent's workflow; the same as tune() in Python."""
    from rft_platform.run.console import refuse_bad_target

    refuse_bad_target(json_file)
    _tune(ctx.params)


def _tune(options: dict[str, Any]) -> None:
    from rft_platform.common.files import write_json
    from rft_platform.tuner import AlgorithmConfig, DatasetConfig, TunerModelConfig
    from rft_platform.tuner import tune as tune_in_python

    judge, config = options["judge"], options["config"]
    renamed = {
        **options,
        "model_path": options["model"],
        "algorithm_type": options["algorithm"],
        "path": options["dataset"],
        "name": options["subset"],
    }
    same = options["eval_dataset"] == options["dataset"] and options["eval_subset"] is None
    subset = options["subset"] if same else options["eval_subset"]
    split = options["eval_split"] or (options["eval_dataset"] and "test")
    held_out = {"path": options["eval_dataset"], "name": subset, "split": split}
    result = tune_in_python(
        workflow_func=_function(options["workflow"], "workflow"),
        judge_func=None if judge is None else _function(judge, "judge"),
        train_dataset=_section(DatasetConfig, "--dataset", renamed, "path"),
        eval_dataset=_section(DatasetConfig, "--eval-dataset", held_out, "path"),
        model=_section(TunerModelConfig, "--model", renamed, "model_path"),
        auxiliary_models=_auxiliaries(options["auxiliary"], options["max_model_len"]),
        algorithm=_section(AlgorithmConfig, "algorithm", renamed),
        project_name=options["project"],
        experiment_name=options["experiment"],
        monitor_type=options["monitor"],
        config_path=None if config is None else str(config),
    )
    if options["json_file"] is not None:
        write_json(options["json_file"].absolute(), result.to_json())


def _auxiliaries(entries: list[str] | None, max_model_len: int | None) -> "dict[str, TunerModelConfig] | None":
    from rft_platform.common.errors import UserError
    from rft_platform.tuner import TunerModelConfig

    models: dict[str, TunerModelConfig] = {}
    for entry in entries or ():
        name, _, model = entry.partition("=")
        if not name or not model or name in models:
            raise UserError(f"--auxiliary {entry!r}: expected NAME=MODEL, each name once")
        if "://" in model:
            raise UserError(
                f"--auxiliary {entry!r}: declare a model that is already served in the file of --config, as "
                f"explorer.auxiliary_models: [{{name: {name}, base_url: {model}, model: ...}}]"
            )
        if max_model_len is None:
            raise UserError(f"--auxiliary {entry!r}: also give --max-model-len, the context of its engine")
        models[name] = TunerModelConfig(model_path=model, max_model_len=max_model_len)
    return models or None


def _function(reference: str, what: str) -> Callable[..., Any]:
    """The referenced function. Raises UserError if its parameters do not fit its role."""
    from rft_platform.common.errors import UserError
    from rft_platform.common.user_code import load_object
    from rft_platform.judging.execution.agentscope_metrics import is_metric
    from rft_platform.judging.types import check_judge_function
    from rft_platform.rollout.workflow import check_workflow_function

    function: Callable[..., Any] = load_object(reference, what)
    try:
        if what == "workflow":
            check_workflow_function(function)
        elif not is_metric(function):
            check_judge_function(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} {reference!r}: {error}") from error
    return function


def _option(what: str, field: str) -> str:
    """The option for a field of the section ``what``."""
    if field in ("split", "name") and what == "--eval-dataset":
        return "--eval-split" if field == "split" else "--eval-subset"
    renamed = {"": what, "path": what, "model_path": "--model", "algorithm_type": "--algorithm", "name": "--subset"}
    return renamed.get(field, f"--{field.replace('_', '-')}")


def _section(kind: "type[TunerSection]", what: str, options: dict[str, Any], needed: str | None = None) -> Any:
    """The settings that the options give; None if option ``needed`` is missing. Raises UserError, a line per fault."""
    from pydantic import ValidationError

    from rft_platform.common.errors import UserError

    values = {name: options[name] for name in kind.model_fields if options.get(name) is not None}
    if needed is not None and needed not in values:
        if values:
            raise UserError(f"{_option(what, next(iter(values)))} needs {what}: give both")
        return None
    try:
        return kind(**values)
    except ValidationError as error:
        lines = [
            f"{option} is missing: give it too"
            if detail["type"] == "missing"
            else f"{option} {detail['input']!r}: {detail['msg']}"
            for detail in error.errors()
            for option in [_option(what, str(detail["loc"][0]) if detail["loc"] else "")]
        ]
        raise UserError("\n".join(lines)) from None
