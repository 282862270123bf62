"""Exploration of a round: its explore batches, rolled out on one policy version and stored."""

from time import perf_counter
from typing import Any

from rft_platform.config.buffer import Taskset
from rft_platform.experience.rounds import round_key
from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.progress import report
from rft_platform.rollout.runner import RolloutReport, run_rollouts
from rft_platform.rollout.workflow import resolve_workflow
from rft_platform.rounds.mend import mending
from rft_platform.rounds.policy import Policy, deploy
from rft_platform.rounds.project import Project
from rft_platform.tasks.selector import select


def explore(project: Project, engine: PolicyEngine, policy: Policy, round_number: int) -> dict[str, Any]:
    """Roll out every explore batch of a round with ``policy`` and store the rows; returns the round's report.

    Repeating it gives the same rows under the same ids.
    """
    config = project.config
    with mending(project, policy):
        canary_delta = deploy(engine, policy)
    started = perf_counter()
    reports = [
        _explore_batch(project, engine, round_number, batch) for batch in range(config.synchronizer.sync_interval)
    ]
    summary = {
        **RolloutReport.merge(reports).as_dict(),
        "seconds": perf_counter() - started,  # with the writing of the rows
        "policy_version": policy.policy_version,
        "policy_round": policy.round,
        "weights_digest": policy.weights_digest,
        "taskset_digest": project.tasks.digest,
        "canary_delta": canary_delta,
    }
    project.store.write_note(round_number, "explore", summary)
    return summary


def _explore_batch(project: Project, engine: PolicyEngine, round_number: int, batch: int) -> RolloutReport:
    config, taskset = project.config, project.taskset
    selector = taskset.task_selector
    step = (round_number - 1) * config.synchronizer.sync_interval + batch
    tasks = select(
        project.tasks.tasks,
        config.buffer.batch_size,
        step,
        selector.selector_type,
        config.seed if selector.seed is None else selector.seed,
    )
    rollouts = run_rollouts(
        engine,
        tasks,
        resolve_workflow(taskset.workflow, taskset.workflow_args, taskset.format.system_prompt),
        round=round_number,
        batch=batch,
        repeat_times=project.repeat_times,
        sampling=sampling_of(project, taskset),
        seed=config.seed,
        concurrency=config.explorer.runner_per_model * config.explorer.rollout_model.engine_num,
        timeout_s=config.explorer.max_timeout,
        max_retries=config.explorer.max_retry_times,
        on_progress=lambda done, total: report(f"{round_key(round_number)} rollouts", done, total),
    )
    project.store.write_rollouts(round_number, batch, rollouts.rows)
    return rollouts.report


def sampling_of(project: Project, taskset: Taskset) -> SamplingParams:
    """How a taskset is sampled: its own ``rollout_args`` before section ``model``."""
    model, args = project.config.model, taskset.rollout_args
    return SamplingParams(
        max_tokens=args.max_tokens or model.response_limit,
        temperature=model.temperature if args.temperature is None else args.temperature,
        top_p=model.top_p if args.top_p is None else args.top_p,
        top_k=model.top_k if args.top_k is None else args.top_k,
    )
