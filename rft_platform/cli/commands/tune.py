"""``rft tune``: ``tune()`` from the shell. Settings without an option come from ``--config`` or the defaults."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rft_platform.tuner import TunerModelConfig
    from rft_platform.tuner.sections import TunerSection

_MODEL, _ALGORITHM, _KEPT = "Model", "Algorithm", "Where it is kept"

_Text = Annotated[str | None, typer.Option(show_default=False)]
_ModelText = Annotated[str | None, typer.Option(rich_help_panel=_MODEL, show_default=False)]
_ModelInt = Annotated[int | None, typer.Option(rich_help_panel=_MODEL, show_default=False)]
_ModelFloat = Annotated[float | None, typer.Option(rich_help_panel=_MODEL, show_default=False)]
_AlgorithmText = Annotated[str | None, typer.Option(rich_help_panel=_ALGORITHM, show_default=False)]
_AlgorithmInt = Annotated[int | None, typer.Option(rich_help_panel=_ALGORITHM, show_default=False)]
_AlgorithmFloat = Annotated[float | None, typer.Option(rich_help_panel=_ALGORITHM, show_default=False)]
_KeptText = Annotated[str | None, typer.Option(rich_help_panel=_KEPT, show_default=False)]
_Judge = Annotated[
    str | None, typer.Option(help="Likewise; without one the workflow's own reward counts.", show_default=False)
]
_Dataset = Annotated[
    str | None, typer.Option(help="Tasks: a folder, a file or a Hugging Face name.", show_default=False)
]
_Model = Annotated[
    str | None,
    typer.Option(help="A folder, a Hugging Face name or models:/NAME@alias.", rich_help_panel=_MODEL),
]
_Thinking = Annotated[
    bool | None, typer.Option("--enable-thinking/--no-thinking", rich_help_panel=_MODEL, show_default=False)
]
_Auxiliary = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=MODEL, a further model for both functions; repeatable. Its context is that of --max-model-len.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
_Experiment = Annotated[
    str | None, typer.Option(help="One that exists is gone on with.", rich_help_panel=_KEPT, show_default=False)
]
_ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; options override it.", show_default=False)
]
_JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result to this file too.", show_default=False)
]


def tune(
    ctx: typer.Context,
    workflow: Annotated[str, typer.Argument(help="package.module:function or file.py:function.", show_default=False)],
    judge: _Judge = None,
    dataset: _Dataset = None,
    subset: _Text = None,
    split: Annotated[str, typer.Option(help="Also a slice: train[:100].")] = "train",
    total_epochs: Annotated[int | None, typer.Option(show_default=False)] = None,
    total_steps: Annotated[int | None, typer.Option(help="In place of epochs.", show_default=False)] = None,
    eval_dataset: Annotated[str | None, typer.Option(help="Held-out tasks.", show_default=False)] = None,
    eval_split: str = "test",
    model: _Model = None,
    max_model_len: _ModelInt = None,
    max_tokens: _ModelInt = None,
    temperature: _ModelFloat = None,
    top_p: _ModelFloat = None,
    enable_thinking: _Thinking = None,
    tensor_parallel_size: _ModelInt = None,
    inference_engine_num: _ModelInt = None,
    tool_call_parser: _ModelText = None,
    reasoning_parser: _ModelText = None,
    auxiliary: _Auxiliary = None,
    algorithm: _AlgorithmText = None,
    learning_rate: _AlgorithmFloat = None,
    group_size: _AlgorithmInt = None,
    batch_size: _AlgorithmInt = None,
    save_interval_steps: _AlgorithmInt = None,
    eval_interval_steps: _AlgorithmInt = None,
    project: _KeptText = None,
    experiment: _Experiment = None,
    monitor: Annotated[str | None, typer.Option(help="tensorboard or mlflow.", show_default=False)] = None,
    config: _ConfigFile = None,
    json_file: _JsonFile = None,
) -> None:
    """Train a model on the runs of an agent's workflow; the same as tune() in Python."""
    from rft_platform.driver.preflight import refuse_bad_target

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
    held_out = {"path": options["eval_dataset"], "split": options["eval_split"]}
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


def _auxiliaries(given: list[str] | None, max_model_len: int | None) -> "dict[str, TunerModelConfig] | None":
    from rft_platform.common.errors import UserError
    from rft_platform.tuner import TunerModelConfig

    models: dict[str, TunerModelConfig] = {}
    for entry in given or ():
        name, _, model = entry.partition("=")
        if not name or not model or name in models:
            raise UserError(f"--auxiliary {entry!r}: expected NAME=MODEL, each name once")
        if "://" in model:
            raise UserError(
                f"--auxiliary {entry!r}: a model that is served already is named in the file of --config, as "
                f"explorer.auxiliary_models: [{{name: {name}, base_url: {model}, model: ...}}]"
            )
        if max_model_len is None:
            raise UserError(f"--auxiliary {entry!r}: give --max-model-len too, the context of its engine")
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
    if field == "split" and what == "--eval-dataset":
        return "--eval-split"
    renamed = {"": what, "path": what, "model_path": "--model", "algorithm_type": "--algorithm", "name": "--subset"}
    return renamed.get(field, f"--{field.replace('_', '-')}")


def _section(kind: "type[TunerSection]", what: str, options: dict[str, Any], needed: str | None = None) -> Any:
    """The settings given by options; None if ``needed`` is missing. Raises UserError with a line per fault."""
    from pydantic import ValidationError

    from rft_platform.common.errors import UserError

    given = {name: options[name] for name in kind.model_fields if options.get(name) is not None}
    if needed is not None and needed not in given:
        lone = [name for name in given if name != "split"]
        if lone:
            raise UserError(f"{what} is missing, and {_option(what, lone[0])} belongs to it: give both")
        return None
    try:
        return kind(**given)
    except ValidationError as error:
        lines = [
            f"give {option} too" if detail["type"] == "missing" else f"{option} {detail['input']!r}: {detail['msg']}"
            for detail in error.errors()
            for option in [_option(what, str(detail["loc"][0]) if detail["loc"] else "")]
        ]
        raise UserError("\n".join(lines)) from None
