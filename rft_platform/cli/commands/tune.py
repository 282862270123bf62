"""``rft tune``: ``tune()`` from the shell. What no option says, a file given by ``--config`` or a default does."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rft_platform.tuner.section import TunerSection

_MODEL, _ALGORITHM, _KEPT = "Model", "Algorithm", "Where it is kept"

_Text = Annotated[str | None, typer.Option(show_default=False)]
_ModelText = Annotated[str | None, typer.Option(rich_help_panel=_MODEL, show_default=False)]
_ModelInt = Annotated[int | None, typer.Option(rich_help_panel=_MODEL, show_default=False)]
_ModelFloat = Annotated[float | None, typer.Option(rich_help_panel=_MODEL, show_default=False)]
_AlgorithmText = Annotated[str | None, typer.Option(rich_help_panel=_ALGORITHM, show_default=False)]
_AlgorithmInt = Annotated[int | None, typer.Option(rich_help_panel=_ALGORITHM, show_default=False)]
_AlgorithmFloat = Annotated[float | None, typer.Option(rich_help_panel=_ALGORITHM, show_default=False)]
_KeptText = Annotated[str | None, typer.Option(rich_help_panel=_KEPT, show_default=False)]


def tune(
    ctx: typer.Context,
    workflow: Annotated[str, typer.Argument(help="package.module:function or file.py:function.", show_default=False)],
    judge: Annotated[
        str | None, typer.Option(help="Likewise; without one the workflow's own reward counts.", show_default=False)
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Tasks: a folder, a file or a Hugging Face name.", show_default=False)
    ] = None,
    subset: _Text = None,
    split: Annotated[str, typer.Option(help="Also a slice: train[:100].")] = "train",
    total_epochs: Annotated[int | None, typer.Option(show_default=False)] = None,
    total_steps: Annotated[int | None, typer.Option(help="In place of epochs.", show_default=False)] = None,
    eval_dataset: Annotated[str | None, typer.Option(help="Held-out tasks.", show_default=False)] = None,
    eval_split: str = "test",
    model: Annotated[
        str | None,
        typer.Option(help="A folder, a Hugging Face name or models:/NAME@alias.", rich_help_panel=_MODEL),
    ] = None,
    max_model_len: _ModelInt = None,
    max_tokens: _ModelInt = None,
    temperature: _ModelFloat = None,
    top_p: _ModelFloat = None,
    enable_thinking: Annotated[
        bool | None, typer.Option("--enable-thinking/--no-thinking", rich_help_panel=_MODEL, show_default=False)
    ] = None,
    tensor_parallel_size: _ModelInt = None,
    inference_engine_num: _ModelInt = None,
    tool_call_parser: _ModelText = None,
    reasoning_parser: _ModelText = None,
    algorithm: _AlgorithmText = None,
    learning_rate: _AlgorithmFloat = None,
    group_size: _AlgorithmInt = None,
    batch_size: _AlgorithmInt = None,
    save_interval_steps: _AlgorithmInt = None,
    eval_interval_steps: _AlgorithmInt = None,
    project: _KeptText = None,
    experiment: Annotated[
        str | None, typer.Option(help="One that exists is gone on with.", rich_help_panel=_KEPT, show_default=False)
    ] = None,
    monitor: Annotated[str | None, typer.Option(help="tensorboard or mlflow.", show_default=False)] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file; options override it.", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file too.", show_default=False)
    ] = None,
) -> None:
    """Train a model on what an agent's workflow does with it; the same as tune() in Python."""
    from rft_platform.driving.preflight import refuse_bad_target

    refuse_bad_target(json_file)
    _tune(ctx.params)


def _tune(options: dict[str, Any]) -> None:
    from rft_platform.files import write_json
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
        algorithm=_section(AlgorithmConfig, "algorithm", renamed),
        project_name=options["project"],
        experiment_name=options["experiment"],
        monitor_type=options["monitor"],
        config_path=None if config is None else str(config),
    )
    if options["json_file"] is not None:
        write_json(options["json_file"].absolute(), result.to_json())


def _function(reference: str, what: str) -> Callable[..., Any]:
    """The function that a reference names; UserError where its parameters are not those of such a function."""
    import sys

    from rft_platform.errors import UserError
    from rft_platform.judging.metric_base import is_metric
    from rft_platform.judging.types import check_judge_function
    from rft_platform.rollout.workflow import check_workflow_function
    from rft_platform.user_code import load_object

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    function: Callable[..., Any] = load_object(reference, what)
    try:
        if what == "workflow":
            check_workflow_function(function)
        elif not is_metric(function):
            check_judge_function(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} {reference!r}: {error}") from error
    return function


def _section(kind: "type[TunerSection]", what: str, options: dict[str, Any], needed: str | None = None) -> Any:
    """The settings that options name; None where ``needed`` is not among them. UserError with a line a fault."""
    from pydantic import ValidationError

    from rft_platform.errors import UserError

    given = {name: options[name] for name in kind.model_fields if options.get(name) is not None}
    if needed is not None and needed not in given:
        lone = [name for name in given if name != "split"]
        if lone:
            raise UserError(f"{what} is missing, and --{lone[0].replace('_', '-')} belongs to it: give both")
        return None
    try:
        return kind(**given)
    except ValidationError as error:
        lines = [f"{what}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()]
        raise UserError("\n".join(lines)) from None
