"""One task end to end without a project: its run, the recorded calls, and the judgement. For `rft debug`.

Everything runs in a temporary home, with the engine, the workflow runner, the recorder and the judges of rollouts.
"""

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rft_platform.cluster.this_process import terminable
from rft_platform.common.errors import JudgeUnavailableError, UserCodeError, UserError
from rft_platform.common.files import write_text
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.home import Home
from rft_platform.config.load import build_config, read_settings
from rft_platform.experience.record import ModelCall, RolloutRow, row_id
from rft_platform.judging.execution.judge_rollouts import TasksetJudge, judge_runs
from rft_platform.judging.types import RunJudgement
from rft_platform.online.project import project_in
from rft_platform.rounds.project.project import Project
from rft_platform.run.console import notes
from rft_platform.run.start import use_home, used_processes_end

if TYPE_CHECKING:
    from rft_platform.config.schema.buffer import Taskset
    from rft_platform.inference.interface import PolicyEngine
    from rft_platform.tasks.task import Task

#: Value of ``--model``: a random model of a million parameters, built from code. Its answers mean nothing.
TINY = "tiny"
_DIGITS = 18  # of a number that no task has more of
SLOW_S = 10.0  # seconds after which a run is reported as slow
_SAMPLE = {"question": "What is 17+25?", "answer": "42"}
_TASKSET = ("buffer", "explorer_input", "taskset")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asked for; None or empty without another remark: as the configuration file says, or a default."""

    config: Path | None = None
    taskset: str = ""  # name of one of the file's tasksets; empty: the first
    workflow: str = ""
    workflow_args: Mapping[str, Any] | None = None
    judge: str | None = ""  # None: no judge
    judge_args: Mapping[str, Any] | None = None
    tasks: Path | None = None
    task: str = "0"  # the task's number in the taskset, or the task itself as a JSON object
    model: str = ""  # of all policies
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DebugRun:
    """A run of one task."""

    task: "Task"
    rows: list[RolloutRow]  # the rows that a round would store, one per model call
    pieces: list[list[str]]  # of each row, the text of each token of the response
    judge: str | None  # None: the workflow gives the reward
    judgement: RunJudgement | None  # None: neither judge nor workflow gives a reward
    seconds: float  # of the run, without the start of the engine


def run_one_task(wanted: Wanted, *, seed: int = 0) -> DebugRun:
    """Run and judge one task.

    Raises UserError if the workflow, the judge, the task or the model cannot be loaded, and UserCodeError with the
    workflow's own error if the run fails. If the judge fails, the judgement has its error.
    """
    with _scratch_project(wanted) as project:
        from rft_platform.rollout.runner.run_rollouts import run_rollouts
        from rft_platform.rounds.setup.connections import connect_engine, connect_policies
        from rft_platform.rounds.setup.side_engines import serving_auxiliaries
        from rft_platform.rounds.setup.taskset_binding import check_judge, check_workflow, how_to_run

        (taskset,) = project.tasksets.values()
        task = _chosen_task(project, wanted)
        check_workflow(project, taskset)
        check_judge(project, taskset)
        with _noted("starting the engine"):
            engine, policies = connect_engine(project), connect_policies(project)
        started = time.perf_counter()
        with serving_auxiliaries(project) as auxiliaries:
            limits = replace(project.settings.limits, max_retries=0, group_policy="partial")
            with _slow_noted(limits.timeout_s):
                batch = run_rollouts(
                    engine, [task], how_to_run(project), round=1, batch=0, repeat_times=1, seed=seed, limits=limits,
                    auxiliary_models=auxiliaries, policies=policies,
                )  # fmt: skip
            judge, judgement = _judged_or_error(project, taskset, task, batch.rows)
        seconds = time.perf_counter() - started
        pieces = _pieces({DEFAULT_POLICY: engine, **policies}, batch.rows)
        return DebugRun(task, batch.rows, pieces, judge, judgement, seconds)


def judge_one_response(wanted: Wanted, response: str) -> DebugRun:
    """Judge a response that the user gives, to one task. No model answers, except those that the judge asks.

    Raises UserError if the judge or the task cannot be loaded, or if there is no judge.
    """
    with _scratch_project(wanted) as project:
        (taskset,) = project.tasksets.values()
        if taskset.judge is None:
            raise UserError("there is no judge: name one with --judge, or a file whose taskset has one with --config")
        task, started = _chosen_task(project, wanted), time.perf_counter()
        row = _row_of(task, response)
        judge, judgement = _judged(project, taskset, task, [row])
        return DebugRun(task, [row], [[]], judge, judgement, time.perf_counter() - started)


@contextmanager
def _scratch_project(wanted: Wanted) -> Iterator[Project]:
    """A project in a temporary home; its processes end with the block."""
    with TemporaryDirectory(prefix="rft-debug-") as folder:
        home = Home(Path(folder))
        use_home(home)
        config = build_config(_settings(wanted, home), str(wanted.config or "rft debug"))
        with terminable(), used_processes_end(home, notes()):
            yield project_in(home, config)


def _settings(wanted: Wanted, home: Home) -> dict[str, Any]:
    """The settings of the file, or those of a new project, with one taskset and the options of the command."""
    settings = read_settings(wanted.config)[0] if wanted.config is not None else _default_settings()
    _check_sections(settings, wanted)
    taskset = _taskset_of(settings, wanted)
    if wanted.workflow:
        taskset |= {"workflow": wanted.workflow, "workflow_args": dict(wanted.workflow_args or {})}
    if wanted.judge is None:
        taskset |= {"judge": None, "judge_args": {}}
    elif wanted.judge:
        taskset |= {"judge": wanted.judge, "judge_args": dict(wanted.judge_args or {})}
    if (inline := _inline_task(wanted)) is not None:
        file, row, format_ = home.root / "task.jsonl", *_in_columns(inline, taskset.get("format") or {})
        write_text(file, json.dumps(row) + "\n")
        taskset |= {"path": str(file), "split": "train", "subset_name": None, "limit": None, "format": format_}
    elif wanted.tasks is not None:
        taskset["path"] = str(wanted.tasks.absolute())
    buffer = {**settings.get("buffer", {})}
    buffer["explorer_input"] = {"taskset": taskset}
    settings = {**settings, "buffer": buffer, "mode": "explore"}
    model = {**settings.get("model", {})}
    model |= {"temperature": wanted.temperature} if wanted.temperature is not None else {}
    model |= {"max_response_tokens": wanted.max_tokens} if wanted.max_tokens is not None else {}
    if wanted.model or "model_path" not in model:
        model["model_path"] = _model(wanted.model or TINY, home)
    if wanted.model and settings.get("policies"):
        settings["policies"] = [{**entry, "model_path": model["model_path"]} for entry in settings["policies"]]
    return {**settings, "model": model}


def _check_sections(settings: dict[str, Any], wanted: Wanted) -> None:
    """Raise UserError if a section that the command changes is no mapping. The rest is checked after the changes."""
    buffer = settings.get("buffer", {})
    inner = buffer.get("explorer_input", {}) if isinstance(buffer, Mapping) else None
    if not all(isinstance(section, Mapping) for section in (settings.get("model", {}), buffer, inner)):
        build_config(settings, str(wanted.config))  # its error names the key


def _default_settings() -> dict[str, Any]:
    return {
        "project": "debug",
        "name": "debug",
        "model": {"max_response_tokens": 64},
        "algorithm": {"algorithm_type": "multi_step_grpo", "repeat_times": 2},
        "buffer": {"batch_size": 1, "total_steps": 1},
    }


def _taskset_of(settings: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """The taskset that the command names, or the first one; a new one if the file has none."""
    given = settings.get("buffer", {}).get("explorer_input", {})
    known = [entry for entry in (given.get("taskset"), *given.get("tasksets", [])) if entry]
    known += given.get("eval_tasksets", [])
    if not wanted.taskset:
        return dict(known[0]) if known else {}
    for entry in known:
        if wanted.taskset in (entry.get("name"), Path(entry.get("path", "")).stem):
            return dict(entry)
    names = ", ".join(str(entry.get("name") or Path(entry.get("path", "")).stem) for entry in known) or "none"
    raise UserError(f"--taskset {wanted.taskset}: the file has the tasksets {names}")


def _inline_task(wanted: Wanted) -> dict[str, Any] | None:
    """The task given as JSON; without a file and a task, a sample; None: the task is in a file."""
    if wanted.task.lstrip().startswith("{"):
        try:
            return dict(json.loads(wanted.task))
        except ValueError as error:
            raise UserError(f"--task: expected a number or a JSON object, got {wanted.task!r} ({error})") from error
    return _SAMPLE if wanted.tasks is None and wanted.config is None else None


def _in_columns(task: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row and the section ``format`` of a task given as JSON.

    A column that the file names and the task lacks gets the task's ``question`` or ``answer``; without it there is no
    such column.
    """
    from rft_platform.tasks.sources import with_nested

    format_, row = {"prompt_key": "question", "response_key": "answer", **given}, dict(task)
    if isinstance(row.get("question"), str):  # also if the file's own workflow reads the whole row
        format_["prompt_key"] = format_["prompt_key"] or "question"
    for key, plain in (("prompt_key", "question"), ("response_key", "answer")):
        column = format_[key]
        if column is None or column in with_nested(row, [column]):
            continue
        if plain in row:
            row[column] = row[plain]
        else:
            format_[key] = None
    return row, format_


def _model(name: str, home: Home) -> str:
    if name != TINY:
        return name
    from rft_platform.recipes.tiny_model import build_model

    with _noted("building a tiny model"):
        return str(build_model(home.root / "model"))


def _chosen_task(project: Project, wanted: Wanted) -> "Task":
    tasks = project.tasks.tasks
    if wanted.task.lstrip().startswith("{"):
        return tasks[0]
    if not wanted.task.isdecimal() or len(wanted.task) > _DIGITS or int(wanted.task) >= len(tasks):
        raise UserError(
            f"--task {wanted.task[:80]}: expected a number from 0 to {len(tasks) - 1}, or the task as a JSON object"
        )
    return tasks[int(wanted.task)]


def _judged_or_error(
    project: Project, taskset: "Taskset", task: "Task", rows: list[RolloutRow]
) -> tuple[str | None, RunJudgement | None]:
    """Like ``_judged``, but the error of a judge that failed is in the judgement, so that the run can be shown."""
    from rft_platform.rounds.setup.taskset_binding import judge_of

    try:
        return _judged(project, taskset, task, rows)
    except (UserCodeError, JudgeUnavailableError) as error:
        spec = judge_of(project, taskset)
        failed = RunJudgement(rows[0].run_id, task.task_id, math.nan, error=str(error))
        return None if spec is None else spec.name, failed


def _judged(
    project: Project, taskset: "Taskset", task: "Task", rows: list[RolloutRow]
) -> tuple[str | None, RunJudgement | None]:
    """Name of the judge and its judgement; None if neither a judge nor the workflow gives a reward."""
    from rft_platform.rounds.setup.side_engines import auxiliaries_for_judges
    from rft_platform.rounds.setup.taskset_binding import judge_of

    spec = judge_of(project, taskset)
    if spec is None and all(row.run_reward is None for row in rows):
        return None, None
    with auxiliaries_for_judges(project, {taskset.known_as: TasksetJudge(spec)}) as auxiliaries:
        (judgement,) = judge_runs(
            rows, {task.task_id: task}, spec, max_abs_reward=taskset.max_abs_reward, auxiliary_models=auxiliaries
        )
    return None if spec is None else spec.name, judgement


def _row_of(task: "Task", response: str) -> RolloutRow:
    """A row as if a workflow had returned ``response``; without tokens, because no model sampled it."""
    call = ModelCall(
        msg_id="given", prompt_ids=[], response_ids=[], rollout_logprobs=[], finish_reason="stop", temperature=1.0,
        top_p=1.0, top_k=-1, messages=[{"role": "user", "content": task.prompt}], tools=[],
        response={"role": "assistant", "content": response},
    )  # fmt: skip
    return RolloutRow(
        row_id=row_id("given", 0), task_id=task.task_id, taskset=task.taskset, group_id="given", run_id="given",
        step=0, round=1, engine="none", template_hash="", call=call, loss_mask=[], truncated=False,
        run_output=response,
    )  # fmt: skip


def _pieces(engines: "Mapping[str, PolicyEngine]", rows: list[RolloutRow]) -> list[list[str]]:
    """The text of each token of each response. A token that is only a part of a character gives U+FFFD."""
    return [
        engines[row.call.policy].decode([[token] for token in row.call.response_ids]) if row.call.response_ids else []
        for row in rows
    ]


@contextmanager
def _slow_noted(limit_s: float) -> Iterator[None]:
    """Print a line if the run takes long. A workflow may use the terminal, so there is no status line."""
    after_s = min(SLOW_S, limit_s / 2)
    line = f"the workflow still runs after {after_s:g} s; after {limit_s:g} s (explorer.max_timeout) it is ended"
    timer = threading.Timer(after_s, notes().print, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _noted(what: str) -> Iterator[None]:
    with notes().status(what):
        yield
