"""How the tasks of a taskset are run and judged: its workflow, sampling parameters and judge, as configured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_json
from rft_platform.config.paths import without_folders
from rft_platform.config.schema.buffer import Taskset, WeightedJudge
from rft_platform.inference.interface import SamplingParams
from rft_platform.judging.execution.compose import JudgeSpec, build_judge
from rft_platform.judging.execution.judge_rollouts import TasksetJudge
from rft_platform.judging.judge_context import EndpointSettings, JudgeState
from rft_platform.rollout.class_style import FormatArgs
from rft_platform.rollout.runner.run_rollouts import HowToRun
from rft_platform.rollout.workers.import_check import check_importable
from rft_platform.rollout.workflow import WorkerWorkflow, Workflow, resolve_workflow
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.judge_workers import judge_workers_of

_BATCHED = "single_turn"  # one engine call for the whole batch: no user code to isolate


def workflow_of(project: Project, taskset: Taskset) -> Workflow:
    """The workflow of ``taskset``. A worker workflow is not imported here: this environment may lack its packages.

    Raises UserError if a workflow for this process cannot be loaded.
    """
    workers = project.config.explorer.workers
    if workers.kind == "inprocess" or taskset.workflow == _BATCHED:
        return _resolved(taskset)
    return worker_workflow(project, taskset)


def worker_workflow(project: Project, taskset: Taskset) -> WorkerWorkflow:
    """The workflow of ``taskset`` for worker processes."""
    workers = project.config.explorer.workers
    return WorkerWorkflow(
        taskset.workflow,
        taskset.workflow_args,
        _format_args(taskset),
        taskset.reward_fn_args,
        workers.python,
        workers.count,
        project.home.logs,
        project.cluster,
        workers.cpus,
        workers.resources,
        workers.runtime_env.fields,
    )


def how_to_run(project: Project) -> dict[str, HowToRun]:
    """How the tasks of each explored taskset are run, by the tasksets' names."""
    return {
        name: HowToRun(workflow_of(project, taskset), sampling_of(project, taskset))
        for name, taskset in project.tasksets.items()
    }


def check_workflow(project: Project, taskset: Taskset) -> None:
    """Raise UserError if the workflow cannot be loaded by the interpreter that runs it."""
    workers = project.config.explorer.workers
    if workers.kind == "inprocess" or not workers.own_imports or taskset.workflow == _BATCHED:
        _resolved(taskset)
        return
    workflow = worker_workflow(project, taskset)
    check_importable(workflow if workflow.runtime_env else replace(workflow, cluster=None))


def _resolved(taskset: Taskset) -> Workflow:
    return resolve_workflow(
        taskset.workflow,
        taskset.workflow_args,
        format_args=_format_args(taskset),
        reward_fn_args=taskset.reward_fn_args,
    )


def _format_args(taskset: Taskset) -> FormatArgs:
    keys = taskset.format
    return FormatArgs(keys.prompt_key, keys.response_key, keys.system_prompt)


@dataclass(frozen=True, slots=True)
class OtherJudge:
    """A judge that replaces the configured one: a name with arguments, or a weighted list."""

    judge: str | Sequence[WeightedJudge]
    args: Mapping[str, Any] = field(default_factory=dict)


def other_judge(judge: str, args: Mapping[str, Any], judges: Sequence[Mapping[str, Any]]) -> OtherJudge | None:
    """The judge that the configuration of a Dagster run names; None without one. Raises UserError if it is invalid."""
    if args and not judge:
        raise UserError(f"judge_args {dict(args)!r} without a judge: name the judge that takes them")
    if not judges:
        return OtherJudge(judge, args) if judge else None
    if judge:
        raise UserError("give judge or judges, not both")
    try:
        return OtherJudge([WeightedJudge.model_validate(entry) for entry in judges])
    except ValidationError as error:
        raise UserError(f"judges: expected a list of {{judge, weight, args}}: {error.errors()[0]['msg']}") from error


def judge_spec(
    taskset: Taskset, other: OtherJudge | None = None, models: Mapping[str, str] | None = None
) -> JudgeSpec | None:
    """The judge of a taskset; None if its workflow gives the rewards. ``models`` maps aliases to models."""
    chosen = other or (OtherJudge(taskset.judge, taskset.judge_args) if taskset.judge is not None else None)
    if chosen is None:
        return None
    keys = taskset.format
    return build_judge(
        chosen.judge, chosen.args, answer_key=keys.response_key, prompt_key=keys.prompt_key, models=models
    )


def judges_of(project: Project, other: OtherJudge | None = None) -> dict[str, TasksetJudge]:
    """The judges of the explored tasksets, by the tasksets' names; ``other`` replaces all of them.

    Raises UserError, with the taskset's name if there are several, if a judge cannot be built.
    """
    state, found = _judge_state(project), dict[str, TasksetJudge]()
    for name, taskset in project.tasksets.items():
        try:
            spec = judge_of(project, taskset, other, state)
        except UserError as error:
            raise UserError(f"taskset {name}: {error}" if len(project.tasksets) > 1 else str(error)) from error
        found[name] = TasksetJudge(spec, taskset.max_abs_reward)
    return found


def _judge_state(project: Project) -> JudgeState:
    return JudgeState.of(project.home, f"{project.config.project}/{project.config.name}")


def judge_of(
    project: Project, taskset: Taskset, other: OtherJudge | None = None, state: JudgeState | None = None
) -> JudgeSpec | None:
    """``judge_spec`` for use in a project: with its auxiliary models, its stored judge answers and its time-out.

    ``state`` is shared by several judges of one judge pass; None: this judge gets a new one.
    """
    config = project.config
    models = {entry.known_as: entry.identity() for entry in config.explorer.auxiliary_models}
    spec = judge_spec(taskset, other, models)
    if spec is None:
        return None
    state = state or _judge_state(project)
    return replace(spec, timeout_s=taskset.judge_timeout_s, state=state, workers=judge_workers_of(project))


def check_judge(project: Project, taskset: Taskset) -> None:
    """Raise UserError if the judge cannot be built, or if the API key of a judge model is not in the environment."""
    spec = judge_of(project, taskset)
    for part in spec.parts if spec else ():
        model = getattr(part.function, "model", None)
        if isinstance(model, EndpointSettings):
            model.api_key()


def sampling_of(project: Project, taskset: Taskset) -> SamplingParams:
    """Sampling parameters of a taskset: ``rollout_args`` of the taskset, completed from section ``model``."""
    model, args = project.config.model, taskset.rollout_args
    return SamplingParams(
        max_tokens=args.max_tokens or model.response_limit,
        temperature=model.temperature if args.temperature is None else args.temperature,
        top_p=model.top_p if args.top_p is None else args.top_p,
        top_k=model.top_k if args.top_k is None else args.top_k,
    )


def measured_by(project: Project, taskset: Taskset) -> str:
    """Digest of the judge's version, the workflow with its arguments, and the sampling parameters.

    The digest contains the workflow's reference and arguments, not its source code, which may belong to another
    environment, nor the folder of its file, which may move. It does not contain the number of runs per task. Raises
    UserError if the judge cannot be loaded.
    """
    judge = judge_of(project, taskset)
    settings = {
        "judge": None if judge is None else judge.version,
        "workflow": taskset.workflow,
        "workflow_args": taskset.workflow_args,
        "reward_fn_args": taskset.reward_fn_args,
        "format": taskset.format.model_dump(mode="json"),
        "sampling": asdict(sampling_of(project, taskset)),
    }
    return digest_json(without_folders(settings))[:16]
