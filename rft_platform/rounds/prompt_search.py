"""Stage of a project beside its rounds: search for a better system prompt for the starting weights.

The search uses tasks that are explored, their workflow, sampling and judge, and a reflection model. Every prompt that
was better than all before it is then measured on the held-out tasks, as the policies of the rounds are, and the last
one has to pass the same gate against the starting prompt. So a report can say what the prompt alone gives, and what the
training gives.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import NonNegativeFloat, PositiveInt, ValidationError

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.common.progress import report
from rft_platform.config.schema.buffer import ExploredTaskset, Taskset
from rft_platform.config.schema.prompt_search import PromptSearch
from rft_platform.evaluation.gate import GateDecision, gate
from rft_platform.evaluation.prompt_search import FailureReward, FoundPrompts, PromptRun, search_prompts
from rft_platform.evaluation.results import SAMPLED, EvaluationResult, Transcript, tasks_digest
from rft_platform.inference.interface import PolicyEngine
from rft_platform.judging.judge_context import EndpointSettings, JudgeContext, JudgeState
from rft_platform.judging.llm.asking import AskingSettings, InvalidAnswerError, ask
from rft_platform.model_registry.prompts import register_prompt
from rft_platform.rollout.workflow import takes_system_prompt
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel
from rft_platform.rounds.evaluate import measure_taskset
from rft_platform.rounds.project.code_version import code_version
from rft_platform.rounds.project.policy import deploy, ended_with
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, required
from rft_platform.rounds.reporting.prompt_report import PromptPoint, PromptResult, write_prompt_report
from rft_platform.rounds.setup.side_engines import serving_auxiliaries, serving_policies
from rft_platform.rounds.setup.taskset_binding import judge_of, measured_by
from rft_platform.tasks.dataset import TaskDataset
from rft_platform.tasks.task import ORIGIN, Task

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry

_NO_TIE = 1e-9  # a prompt that is exactly as good as the starting one is not better
_SHOWN = 2000  # characters of a message that the reflection model reads
_log = logging.getLogger(__name__)


class _Reflection(AskingSettings):
    """How to ask the reflection model. Its defaults are not those of a judge: prompts are long, and should differ."""

    role: ClassVar[str] = "prompt_search.reflection: the reflection model"
    temperature: NonNegativeFloat = 1.0
    max_tokens: PositiveInt = 4096


@dataclass(frozen=True, slots=True)
class _Search:
    """What is searched: the settings, the tasks with their taskset, the starting prompt, and the reflection model."""

    settings: PromptSearch
    taskset: ExploredTaskset
    dataset: TaskDataset  # the drawn tasks
    start: str
    reflection: _Reflection


def check_prompt_search(project: Project) -> None:
    """Raise UserError if the section ``prompt_search`` is missing or cannot be used."""
    _prepared(project)


def optimise_prompt(project: Project, engine: PolicyEngine, registry: "ModelRegistry") -> PromptResult:
    """Search for a prompt, measure what was found on the held-out tasks, write the report, register the best one.

    If no prompt was better than the starting one, nothing is registered. A repeated call searches again; answers of
    the reflection model are kept, as those of judges are. Raises UserError if the configuration names no search, and
    JudgeUnavailableError if the reflection model does not answer. If MLflow refuses the prompt, the report stays.
    """
    started, search, policy = perf_counter(), _prepared(project), required(project.store, 0)
    deploy(engine, policy)
    with (
        serving_auxiliaries(project) as auxiliaries,
        serving_policies(project, ended_with(project, 0)) as policies,
    ):
        measuring = _Measuring(project, engine, auxiliaries, policies, search.settings.runs)
        found = search_prompts(
            lambda prompt, tasks: measuring.runs(search, prompt, tasks),
            search.dataset.tasks,
            search.start,
            _asking(project, search.reflection, auxiliaries),
            runs=search.settings.runs,
            minibatch=search.settings.minibatch,
            seed=project.config.seed,
        )
        points = measuring.held_out(found)
    decision = _decision(project, [point.result for point in points])
    result = PromptResult(
        policy_version=policy.policy_version,
        points=points,
        tried=found.tried,
        runs=found.runs,
        tasks=len(search.dataset.tasks),
        decision=decision,
        lineage=_lineage(project, search, policy),
        seconds=perf_counter() - started,
    )
    return _stored(project, registry, result)


def _stored(project: Project, registry: "ModelRegistry", result: PromptResult) -> PromptResult:
    """The result with its address in MLflow. It is first written without one: a search may have taken hours."""
    write_prompt_report(project, result)
    if not result.found:
        return result
    training, passed = project.config.name, result.decision.passed
    address = register_prompt(registry, training, result.best.text, result.tags(), promote=passed)
    registered = replace(result, address=address)
    write_prompt_report(project, registered)
    return registered


def _prepared(project: Project) -> _Search:
    settings, inputs = project.config.prompt_search, project.config.buffer.explorer_input
    if settings is None:
        raise UserError("no prompt_search in the configuration: add the section, with the reflection model")
    if project.settings.offline is not None:
        raise UserError(
            f"prompt_search: algorithm_type {project.config.algorithm.algorithm_type} with mode train trains on a "
            "dataset, and a prompt is searched for the starting weights of a project that explores: remove the "
            "section, or search in a project with mode both"
        )
    if not inputs.explored or not inputs.eval_tasksets:
        raise UserError("prompt_search needs an explored taskset to search with and one of eval_tasksets to measure by")
    name, taskset = next(iter(project.tasksets.items()))
    start = settings.start or taskset.format.system_prompt
    if not start:
        raise UserError("prompt_search.start is not set, and the taskset has no format.system_prompt: set one of them")
    for each in (taskset, inputs.eval_tasksets[0]):
        _check_takes_prompts(each, project.config.explorer.workers.own_imports)
    reflection = _reflection(project, settings)
    drawn = _drawn(project, project.datasets[name], settings.tasks)
    if settings.runs <= (count := len(drawn.tasks)):
        raise UserError(
            f"prompt_search.runs is {settings.runs}, which the starting prompt takes on {count} tasks "
            f"(prompt_search.tasks), so nothing would be searched: set runs to {count + 1} or more, "
            f"for example {15 * count}, or fewer tasks"
        )
    return _Search(settings, taskset, drawn, start, reflection)


def _check_takes_prompts(taskset: Taskset, own_imports: bool) -> None:
    """Raise UserError if the prompts of a search would not reach the workflow."""
    if "system_prompt" in taskset.workflow_args:
        raise UserError(
            f"prompt_search: workflow_args.system_prompt of {taskset.name or taskset.path} would replace every prompt "
            "of the search: remove it, and set format.system_prompt instead"
        )
    if not own_imports and not takes_system_prompt(taskset.workflow):
        raise UserError(
            f"prompt_search: the workflow {taskset.workflow} takes no system prompt: give it a parameter "
            "system_prompt, which gets format.system_prompt, and use it"
        )


def _reflection(project: Project, settings: PromptSearch) -> _Reflection:
    """How to ask the reflection model. Raises UserError if it is unknown, lacks its key, or has invalid settings."""
    try:
        reflection = _Reflection.model_validate(settings.reflection)
    except ValidationError as error:
        # A model's loc names its type behind ``model``. A mapping is invalid as a name, too, which tells nothing.
        wrong = max(error.errors(), key=lambda fault: fault["loc"][:1] == ("model",) and len(fault["loc"]) > 2)
        path = wrong["loc"][:1] + wrong["loc"][2 if wrong["loc"][0] == "model" else 1 :]
        given = "" if wrong["type"] in ("missing", "extra_forbidden") else f", got {wrong['input']!r}"
        raise UserError(f"{'.'.join(map(str, ('prompt_search.reflection', *path)))}: {wrong['msg']}{given}") from error
    if isinstance(reflection.model, EndpointSettings):
        reflection.model.api_key(reflection.role)
    elif reflection.model not in {entry.known_as for entry in project.config.explorer.auxiliary_models}:
        raise UserError(
            f"prompt_search.reflection.model {reflection.model!r} is not one of explorer.auxiliary_models: add it "
            "there, or give {base_url, model, api_key_env}"
        )
    return reflection


def _drawn(project: Project, dataset: TaskDataset, count: int) -> TaskDataset:
    """``count`` tasks, drawn with the seed. Tasks of imported traces are left out: a prompt may quote its tasks, and
    `rft forget` could not erase them from a prompt.
    """
    tasks = [task for task in dataset.tasks if ORIGIN not in task.raw]
    if not tasks:
        raise UserError("prompt_search: all tasks are of imported traces, which a prompt could quote; add other tasks")
    if own := sum(task.system is not None for task in tasks):
        raise UserError(
            f"prompt_search: {own} tasks of {dataset.report.source} have a system message of their own, which no other "
            "prompt replaces: give prompts without one"
        )
    chosen = random.Random(project.config.seed).sample(tasks, min(count, len(tasks)))
    return replace(dataset, tasks=tuple(chosen))


@dataclass(slots=True)
class _Measuring:
    """Runs of prompts with the engine's policy."""

    project: Project
    engine: PolicyEngine
    auxiliaries: Mapping[str, AuxiliaryModel]
    policies: Mapping[str, PolicyEngine]
    budget: int
    _made: int = field(default=0, init=False)
    _succeeded: bool = field(default=False, init=False)
    _failure: FailureReward = field(default_factory=FailureReward, init=False)

    def runs(self, search: _Search, prompt: str, tasks: Sequence[Task]) -> list[PromptRun]:
        """One run of each task; a failed one counts as ``FailureReward`` says. A task that occurs twice is run once."""
        result = self._measured(search, prompt, tuple({task.task_id: task for task in tasks}.values()))
        self._made += len(tasks)
        report("prompt search", min(self._made, self.budget), self.budget)
        read = {each.task_id: each for each in result.transcripts} if result else {}
        scores = result.scores.get(SAMPLED, {}) if result else {}
        rewards = {task_id: of_task[0] for task_id, of_task in scores.items()}
        failed = self._failure.after(rewards.values())
        return [
            PromptRun(rewards[task.task_id], _record(read.get(task.task_id)))
            if task.task_id in rewards
            else PromptRun(failed, {"task": task.prompt, "failed": "the run ended with an error"})
            for task in tasks
        ]

    def _measured(self, search: _Search, prompt: str, tasks: tuple[Task, ...]) -> EvaluationResult | None:
        """One run of each task; None if workflow or judge failed on all. Raises UserCodeError if that happens first."""
        try:
            result = measure_taskset(
                self.project, self.engine, with_prompt(search.taskset, prompt), replace(search.dataset, tasks=tasks),
                0, 1, False, self.auxiliaries, self.policies, quiet=True, transcripts=len(tasks),
            )  # fmt: skip
        except UserCodeError as error:
            if not self._succeeded:
                raise
            _log.warning("prompt search: no run of %d tasks succeeded with a prompt: %s", len(tasks), error)
            return None
        self._succeeded = True
        return result

    def held_out(self, found: FoundPrompts) -> list[PromptPoint]:
        """The found prompts with their results on the first held-out taskset."""
        taskset, dataset = self.project.eval_tasks[0]
        settings, alike = self.project.config.evaluation, measured_by(self.project, taskset)
        points = []
        for number, prompt in enumerate(found.prompts):
            report("prompts on held-out tasks", number, len(found.prompts))
            result = measure_taskset(
                self.project, self.engine, with_prompt(taskset, prompt.text), dataset, 0,
                taskset.rollout_args.n or settings.sampled_n, settings.greedy, self.auxiliaries, self.policies,
                quiet=True,
            )  # fmt: skip
            # The prompt is what differs; all else is as in the evaluations of the rounds.
            points.append(PromptPoint(prompt.text, prompt.reward, prompt.runs, replace(result, measured_by=alike)))
        report("prompts on held-out tasks", len(found.prompts), len(found.prompts))
        return points


def with_prompt(taskset: Taskset, prompt: str) -> Taskset:
    """The taskset with another system prompt."""
    changed = taskset.format.model_copy(update={"system_prompt": prompt})
    return taskset.model_copy(update={"format": changed})


def _record(transcript: Transcript | None) -> dict[str, Any]:
    """What the reflection model reads of a run: the conversation after the system prompt, and the expected answer."""
    if transcript is None:
        return {}
    messages = [message for message in transcript.messages if message.get("role") != "system"]
    lines = [f"{message.get('role')}: {_cut(_text(message))}" for message in messages]
    expected = {} if transcript.expected is None else {"expected answer": _cut(transcript.expected)}
    return {"conversation": "\n\n".join(lines), **expected}


def _text(message: Mapping[str, Any]) -> str:
    calls = [f"-> {call['function'].get('name')}({call['function'].get('arguments')})"
             for call in message.get("tool_calls") or [] if "function" in call]  # fmt: skip
    return "\n".join([str(message.get("content") or ""), *calls]).strip()


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


def _asking(project: Project, settings: _Reflection, auxiliaries: Mapping[str, AuxiliaryModel]) -> Callable[[str], str]:
    """A question to the reflection model, with the limits and the kept answers of a judge's model."""
    state = JudgeState.of(project.home, f"{project.config.project}/{project.config.name}")

    def not_empty(answer: str) -> str:
        if not answer.strip():
            raise InvalidAnswerError("it is empty")
        return answer

    async def asked(question: str) -> str:
        context = JudgeContext(state, auxiliaries)
        try:
            return await ask(context, settings, [{"role": "user", "content": question}], not_empty)
        finally:
            await context.aclose()

    return lambda question: asyncio.run(asked(question))


def _decision(project: Project, results: Sequence[EvaluationResult]) -> GateDecision:
    """Whether the best prompt is better than the starting one, by the rule for a new champion."""
    if len(results) == 1:
        return GateDecision(False, "no prompt was better than the starting one on the tasks of the search")
    settings = project.config.evaluation
    return gate(
        results[-1],
        results[0],
        metric=settings.gate.metric,
        min_delta=max(settings.gate.min_delta, _NO_TIE),
        min_value=settings.gate.min_value,
        confident=settings.gate.needs_interval,
        to_beat="starting prompt",
    )


def _lineage(project: Project, search: _Search, policy: Policy) -> dict[str, str]:
    """What the prompt was made of, as tags of its version."""
    from importlib.metadata import version

    judge, model = judge_of(project, search.taskset), search.reflection.model
    settings = {**search.settings.model_dump(include={"tasks", "runs", "minibatch"}), "seed": project.config.seed}
    return {
        "optimiser": f"gepa {version('gepa')}",
        "optimiser_settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
        "reflection_model": model if isinstance(model, str) else f"{model.model} at {model.base_url}",
        "dataset_digest": search.dataset.digest,
        "search_tasks_digest": tasks_digest(task.task_id for task in search.dataset.tasks),
        "held_out_digest": project.eval_tasks[0][1].digest,
        "judge_version": "the workflow's own reward" if judge is None else judge.version,
        "workflow": search.taskset.workflow,
        "policy_version": str(policy.policy_version),
        "weights_digest": policy.weights_digest,
        "code": code_version(),
    }
