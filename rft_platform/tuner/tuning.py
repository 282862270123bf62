"""``tune()``: train a better model from an agent's workflow, a judge and a dataset.

It materialises the same Dagster assets as ``rft run``, in the caller's process and against a persistent instance, so
that everything can be inspected in the UI afterwards. A caller may have a running event loop, as notebooks do.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rft_platform.common.errors import RftError, UserError
from rft_platform.common.user_code import file_being_loaded
from rft_platform.tuner.result import ExperimentPaths, TuneResult, result_of
from rft_platform.tuner.sections import AlgorithmConfig, DatasetConfig, TunerModelConfig
from rft_platform.tuner.translation import TuneArguments, TunedFunctions, translate, tuned_functions
from rft_platform.tuner.types import JudgeType, WorkflowType

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.config.schema.rft_config import RftConfig
import asyncio
import signal
import threading
from asyncio.events import _set_running_loop  # in the module's ``__all__``: for programs that run loops themselves
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def outside_event_loop(work: Callable[[], Result]) -> Result:
    """Call ``work`` and return its result. An event loop in which the caller runs is suspended until ``work`` returns.

    ``work`` runs in the calling thread, may run its own event loops, and is interrupted by Ctrl-C like any other
    code of the main thread. User code that must be stoppable at any point belongs in worker processes
    (``explorer.workers: {kind: process}``).
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with _suspended(loop), _ctrl_c_raises():
        return work()


@contextmanager
def _suspended(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let this thread run other event loops. ``loop`` cannot run in this time, because its caller blocks."""
    _set_running_loop(None)
    try:
        yield
    finally:
        asyncio.set_event_loop(loop)  # ``asyncio.run`` has removed it
        _set_running_loop(loop)


@contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt here; ``asyncio.run`` would only cancel a task that cannot run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_ENVIRONMENT = ("RFT_HOME", "DAGSTER_HOME")


def tune(
    *,
    workflow_func: WorkflowType,
    judge_func: JudgeType | None = None,
    train_dataset: DatasetConfig | None = None,
    eval_dataset: DatasetConfig | None = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig] | None = None,
    algorithm: AlgorithmConfig | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | None = None,
    config_path: str | None = None,
) -> TuneResult:
    """Train ``model`` on the runs of ``workflow_func`` on the tasks of ``train_dataset``.

    Args:
        workflow_func: solves one task with the model that it is given; parameters ``task``, ``model`` [,
            ``auxiliary_models``] [, ``logger``].
        judge_func: rewards a run; parameters ``task``, ``response`` [, ``auxiliary_models``] [, ``logger``]. It may be
            an AgentScope metric. Without a judge the workflow's own reward counts.
        eval_dataset: evaluated with the same functions at the start, every ``eval_interval_steps`` and at the end.
        auxiliary_models: models that the functions may use, by name; they are not trained.
        project_name: default ``AgentScope``.
        experiment_name: an existing experiment is continued; default ``Experiment-`` and the time.
        monitor_type: tensorboard, mlflow, wandb or swanlab; default the first two.
        config_path: a YAML file with all settings that the other arguments do not give; the arguments override it.

    Everything is stored below ``./checkpoints/<project>/<experiment>``; ``RFT_HOME`` in the environment is ignored.
    Ctrl-C ends the training cleanly; the same call with this ``experiment_name`` continues the training.

    Raises:
        ValueError: a function's parameters are not those of a workflow or a judge.
        UserError: settings are invalid. The error lists all of them, and nothing has started.
        UserCodeError: workflow or judge failed on every run.
    """
    _refuse_when_imported()
    functions = tuned_functions(workflow_func, judge_func)
    arguments = TuneArguments(
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        model=model,
        auxiliary_models=auxiliary_models,
        algorithm=algorithm,
        project_name=project_name,
        experiment_name=experiment_name,
        monitor_type=monitor_type,
        config_path=config_path,
    )
    arguments.check_types()
    config, paths = translate(arguments, functions)
    notices = [notice for notice in (functions.notice, arguments.notice) if notice is not None]
    return _run_without_event_loop(config, paths, functions, notices)


def _refuse_when_imported() -> None:
    """Raise UserError if ``tune()`` is called by a module that is being imported as user code."""
    if (file := file_being_loaded()) is not None:
        raise UserError(f'{file} calls tune() when it is imported: put the call below `if __name__ == "__main__":`')


def _run_without_event_loop(
    config: "RftConfig", paths: ExperimentPaths, functions: TunedFunctions, notices: list[str]
) -> TuneResult:
    try:
        return outside_event_loop(lambda: _run(config, paths, functions, notices))
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # without the traceback of the code below


def _run(config: "RftConfig", paths: ExperimentPaths, functions: TunedFunctions, notices: list[str]) -> TuneResult:
    from rft_platform.config.home import private_files
    from rft_platform.online.project import open_project
    from rft_platform.run.console import notes
    from rft_platform.run.start import begin, drive_project, use_home

    console = notes()
    with _environment_kept(), private_files():
        use_home(paths.home)
        if (line := paths.home.make_private()) is not None:
            notices = [*notices, line]
        plan = begin(paths.home, config)
        for notice in notices:
            console.print(f"note: {notice}", markup=False, soft_wrap=True)
        console.print(f"{plan.title}, kept in {paths.folder}", style="bold", markup=False, soft_wrap=True)
        project = open_project(paths.home)
        try:
            drive_project(project, console)
        except (KeyboardInterrupt, RftError) as error:
            what = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped"
            _print_how_to_resume(console, paths, functions, what)
            raise
        result = result_of(project, paths)
        _print_result(console, result)
    return result


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Restore the environment variables and ``sys.path`` of the caller's process afterwards."""
    before, path = {name: os.environ.get(name) for name in _ENVIRONMENT}, list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _print_how_to_resume(console: "Console", paths: ExperimentPaths, functions: TunedFunctions, what: str) -> None:
    from rft_platform.run.next_steps import rft_command

    home = paths.home
    lines = [f"{what}: tune(..., experiment_name={paths.experiment!r}) continues this run"]
    if functions.notice is None:
        lines.append(f"or, from this folder: {rft_command(home)} run --config {home.config_file}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _print_result(console: "Console", result: TuneResult) -> None:
    from rft_platform.config.home import Home
    from rft_platform.run.next_steps import rft_command

    facts = {
        "checkpoint": result.checkpoint or "nothing was trained",
        "model version": result.model_version or "not registered",
        "curves": f"tensorboard --logdir {result.folder / 'monitor' / 'tensorboard'}",
        "every row": f"{rft_command(Home(result.home))} ui",
    }
    for name, fact in facts.items():
        console.print(f"{name:<14} {fact}", markup=False, soft_wrap=True)
