"""Evaluate the policy that the engine serves now on the project's held-out tasksets."""

from collections.abc import Mapping

from rft_platform.common.progress import report
from rft_platform.config.schema.buffer import Taskset
from rft_platform.evaluation.evaluate import evaluate
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.file_names import round_key
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel
from rft_platform.rounds.project.policy import ended_with
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.side_engines import serving_auxiliaries, serving_policies
from rft_platform.rounds.setup.taskset_binding import judge_of, measured_by, sampling_of, workflow_of
from rft_platform.tasks.dataset import TaskDataset


def measure(project: Project, engine: PolicyEngine, round_number: int) -> list[EvaluationResult]:
    """Sampled and greedy scores on every held-out taskset, in the order of the configuration.

    The other policies take part in the versions that the round published.
    """
    settings = project.config.evaluation
    results, policies = [], ended_with(project, round_number)
    with serving_auxiliaries(project) as auxiliaries, serving_policies(project, policies) as engines:
        for taskset, dataset in project.eval_tasks:
            runs = taskset.rollout_args.n or settings.sampled_n
            greedy = settings.greedy
            results.append(
                _measure_taskset(project, engine, taskset, dataset, round_number, runs, greedy, auxiliaries, engines)
            )
    return results


def sampled_pass(project: Project, engine: PolicyEngine) -> float:
    """Sampled pass rate on the first held-out taskset, one run per task, without progress reports."""
    taskset, dataset = project.eval_tasks[0]
    with serving_auxiliaries(project) as auxiliaries:
        result = _measure_taskset(project, engine, taskset, dataset, 0, 1, False, auxiliaries, {}, quiet=True)
    return result.summary()["sampled_pass"]


class _Progress:
    """One progress line for the sampled and then the greedy runs of a taskset, which are counted separately."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._before = self._last = 0
        self._mode_ended = False
        report(what, 0, total)

    def __call__(self, done: int, total: int) -> None:
        """``done`` runs of the current mode have finished."""
        if self._mode_ended or done < self._last:
            self._before += self._last
        self._last, self._mode_ended = done, done >= total
        if self._before + done < self._total:  # ``finish`` reports the end, also if runs failed
            report(self._what, self._before + done, self._total)

    def finish(self) -> None:
        """Report that the evaluation has finished."""
        report(self._what, self._total, self._total)


def _measure_taskset(
    project: Project,
    engine: PolicyEngine,
    taskset: Taskset,
    dataset: TaskDataset,
    round_number: int,
    sampled_n: int,
    greedy: bool,
    auxiliaries: Mapping[str, AuxiliaryModel],
    policies: Mapping[str, PolicyEngine],
    quiet: bool = False,
) -> EvaluationResult:
    config = project.config
    name = "start" if round_number == 0 else round_key(round_number)
    if len(project.eval_tasks) > 1:
        name = f"{name} {taskset.name or dataset.tasks[0].taskset}"
    progress = None if quiet else _Progress(f"{name} evaluation", len(dataset.tasks) * (sampled_n + greedy))
    result = evaluate(
        engine,
        dataset.tasks,
        workflow=workflow_of(project, taskset),
        judge=judge_of(project, taskset),
        sampled_n=sampled_n,
        greedy=greedy,
        sampling=sampling_of(project, taskset),
        seed=config.seed,
        round=round_number,
        bootstrap_seed=config.evaluation.bootstrap_seed,
        limits=project.settings.limits,
        max_abs_reward=taskset.max_abs_reward,
        auxiliary_models=auxiliaries,
        policies=policies,
        measured_by=measured_by(project, taskset),
        on_progress=progress,
    )
    if progress is not None:
        progress.finish()
    return result
