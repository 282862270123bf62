"""``rft debug workflow | judge | model``: one task end to end, without a project."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rft_platform.run.debug import DebugRun

debug = typer.Typer(
    no_args_is_help=True, help="Try a workflow, a judge or a model on one task. Needs no project, leaves nothing."
)

_Config = Annotated[Path | None, typer.Option("--config", "-c", help="Take settings and taskset from this YAML file.")]
_Taskset = Annotated[str, typer.Option(help="With --config: name of the taskset; default: the first one.")]
_Tasks = Annotated[Path | None, typer.Option(help="File with tasks (JSONL, JSON, CSV, Parquet).")]
_Task = Annotated[str, typer.Option(help="Number of the task, from 0, or the task itself as a JSON object.")]
_Judge = Annotated[str, typer.Option(help="Built-in name or module:function.")]
_JudgeArgs = Annotated[str, typer.Option(help="Keyword arguments of --judge, as a JSON object.")]
_Model = Annotated[
    str,
    typer.Option(
        help="Folder or name of a model, for all policies; `tiny`: a random model built from code (default without "
        "--config)."
    ),
]
_MaxTokens = Annotated[int | None, typer.Option(min=1, help="Limit of an answer, in tokens.")]
_Temperature = Annotated[float | None, typer.Option(min=0.0, help="Sampling temperature.")]
_Seed = Annotated[int, typer.Option(min=0, help="Seed of the sampling.")]
_Tokens = Annotated[bool, typer.Option("--tokens", help="Also print every token with its log-prob.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@debug.command("workflow")
def debug_workflow(
    workflow: Annotated[
        str, typer.Argument(help="Built-in name, module:function or file.py:function; default: that of --config.")
    ] = "",
    args: Annotated[str, typer.Option(help="Keyword arguments of a workflow class, as a JSON object.")] = "",
    config: _Config = None,
    taskset: _Taskset = "",
    tasks: _Tasks = None,
    task: _Task = "0",
    judge: _Judge = "",
    judge_args: _JudgeArgs = "",
    model: _Model = "",
    temperature: _Temperature = None,
    max_tokens: _MaxTokens = None,
    seed: _Seed = 0,
    tokens: _Tokens = False,
    as_json: _Json = False,
) -> None:
    """Run a workflow on one task; print messages, tool calls, rows and reward, or the error of the judge."""
    from rft_platform.cli.commands.judge import arguments
    from rft_platform.common.errors import UserCodeError, UserError
    from rft_platform.run.debug import Wanted, run_one_task

    if not workflow and config is None:
        raise UserError("name a workflow (`rft debug workflow my_agent.py:workflow`), or a file that has one: --config")
    of_judge = arguments(judge_args, "--judge-args")
    wanted = Wanted(
        config, taskset, workflow, arguments(args), judge, of_judge, tasks, task, model, temperature, max_tokens
    )
    try:
        found = run_one_task(wanted, seed=seed)
    except UserCodeError as error:
        _print_traceback(error)
        raise
    _show(found, tokens, as_json)
    if found.judgement is not None and found.judgement.error is not None:
        raise typer.Exit(1)


@debug.command("judge")
def debug_judge(
    response: Annotated[str, typer.Argument(help="The response to judge.")],
    judge: _Judge = "",
    judge_args: _JudgeArgs = "",
    config: _Config = None,
    taskset: _Taskset = "",
    tasks: _Tasks = None,
    task: _Task = "0",
    as_json: _Json = False,
) -> None:
    """Judge one response to one task; prints the reward and its parts."""
    from rft_platform.cli.commands.judge import arguments
    from rft_platform.run.debug import Wanted, judge_one_response

    wanted = Wanted(config, taskset, "", None, judge, arguments(judge_args, "--judge-args"), tasks, task)
    _show(judge_one_response(wanted, response), tokens=False, as_json=as_json)


@debug.command("model")
def debug_model(
    prompt: Annotated[str, typer.Argument(help="The user's message.")],
    model: _Model = "",
    config: _Config = None,
    temperature: _Temperature = None,
    max_tokens: _MaxTokens = None,
    seed: _Seed = 0,
    as_json: _Json = False,
) -> None:
    """Ask a model once; prints the answer and each of its tokens with the log-prob."""
    import json

    from rft_platform.run.debug import Wanted, run_one_task

    wanted = Wanted(
        config, workflow="single_turn", judge=None, task=json.dumps({"question": prompt}), model=model,
        temperature=temperature, max_tokens=max_tokens,
    )  # fmt: skip
    _show(run_one_task(wanted, seed=seed), tokens=True, as_json=as_json, reward=False)


def _print_traceback(error: BaseException) -> None:
    """Print where the user's code failed; the error itself is printed when the command ends."""
    from rft_platform.common.fault_classification import user_traceback
    from rft_platform.run.console import notes

    if error.__cause__ is not None and (trace := user_traceback(error.__cause__)) is not None:
        notes().print(trace, style="dim", markup=False, highlight=False, soft_wrap=True)


def _show(found: "DebugRun", tokens: bool, as_json: bool, reward: bool = True) -> None:
    from rft_platform.cli.views.transcript import print_run, run_json
    from rft_platform.run.console import output, print_json

    if as_json:
        print_json(run_json(found))
    else:
        print_run(found, output(), tokens=tokens, reward=reward)
