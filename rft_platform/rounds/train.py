"""Training of a round: from its judged experiences to a published checkpoint."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rft_platform.algorithms.presets import preset
from rft_platform.config.load import config_digest
from rft_platform.config.trainer import Optimizer
from rft_platform.errors import StorageError, UserError
from rft_platform.experience.rounds import round_key
from rft_platform.inference.canary import Canary
from rft_platform.progress import report
from rft_platform.rounds.mend import mending, refuse_damaged_rows
from rft_platform.rounds.policy import Policy, parent_of, publish, published, required
from rft_platform.rounds.project import Project
from rft_platform.rounds.provenance import code_version
from rft_platform.training.protocol import AlgorithmSpec, LoraSpec, OptimizerSpec, StepEvent, TrainRequest, TrainResult

if TYPE_CHECKING:
    from rft_platform.training.group import TrainerClient

NOTE = "train"

#: Metrics worth watching while a round trains.
_WATCHED = ("loss", "grad_norm", "entropy")
_CANARY_ROWS = 8


def train(
    project: Project, trainer: "TrainerClient", round_number: int, run_id: str
) -> tuple[TrainResult, list[StepEvent]]:
    """Run the optimiser steps of a round and publish the policy they lead to.

    A round whose rewards are all equal is a recorded no-op: its policy is its parent's. ``run_id`` is the
    orchestrator's name for this run, kept in the lineage.
    """
    store = project.store
    if published(store, round_number + 1) is not None:
        raise UserError(
            f"{round_key(round_number)} has a successor that was trained from its weights: training it again would "
            "change what those came from; judge it anew to compare, or start a project of another name"
        )
    parent = parent_of(store, round_number)
    steps: list[StepEvent] = []
    total = steps_a_round(project)

    def on_step(event: StepEvent) -> None:
        steps.append(event)
        done = event.step - parent.policy_version
        watched = {name: event.metrics[name] for name in _WATCHED if name in event.metrics}
        report(f"{round_key(round_number)} training", done, max(total, done), **watched)

    refuse_damaged_rows(project, round_number, rests_on="judge")
    request = train_request(project, parent, round_number, run_id)
    with ExitStack() as weights:
        for policy in (parent, *([required(store, 0)] if request.reference else [])):
            weights.enter_context(mending(project, policy))
        result = trainer.train(request, on_step)
    started = perf_counter()
    policy = Policy(
        folder=result.checkpoint,
        policy_version=result.policy_version,
        weights_digest=result.weights_digest,
        round=round_number,
        canary=parent.canary if result.steps == 0 else take_canary(project, trainer, round_number),
    )
    result = replace(result, seconds={**result.seconds, "canary": perf_counter() - started})
    events = [asdict(event) for event in steps]
    note = {**asdict(result), "step_events": events, "engine_mismatch": engine_mismatch(steps)}
    store.write_note(round_number, NOTE, note)
    publish(store, policy)
    return result, steps


def engine_mismatch(steps: Sequence[StepEvent]) -> float | None:
    """Mean |delta log-prob| in nats between the engine that sampled and the trainer, for the very same weights.

    Only the first step tells, and only where the round explored with its parent: later the policy has moved on.
    """
    first = steps[0].metrics if steps else {}
    return first.get("mismatch_abs") if first.get("staleness_max") == 0 else None


def train_request(project: Project, parent: Policy, round_number: int, run_id: str) -> TrainRequest:
    """What the trainer is asked for: the same for the same round, rows and configuration.

    Raises StorageError where no judgement is in force.
    """
    config, store = project.config, project.store
    rollouts, judged = store.rollout_files(round_number), store.judged_file(round_number)
    if judged is None:
        key = round_key(round_number)
        raise StorageError(f"{key} has no judgement in force, which its training reads: launch judge_job for {key}")
    lora = config.model.lora_configs[0] if config.model.lora_configs else None
    return TrainRequest(
        parent=parent.folder,
        parent_version=parent.policy_version,
        output=str(project.checkpoints),
        algorithm=algorithm_spec(project),
        optimizer=optimizer_spec(
            config.algorithm.optimizer, project.rounds_budget * steps_a_round(project), config.trainer.grad_clip
        ),
        rollouts=tuple(str(file) for file in rollouts),
        judged=(str(judged),),
        train_batch_size=project.train_batch_size,
        max_tokens_per_pack=config.trainer.max_token_len_per_gpu,
        seed=config.seed + round_number,
        fresh_optimizer=parent.policy_version == 0,
        lora=None if lora is None else LoraSpec(lora.lora_rank, lora.lora_alpha, _targets(lora.target_modules)),
        reference=required(store, 0).folder if config.algorithm.beta else None,
        lineage=lineage(project, round_number, run_id),
    )


def lineage(project: Project, round_number: int, run_id: str) -> dict[str, Any]:
    """What made a round's weights: kept in the checkpoint's manifest and in the tags of its model version."""
    config, store = project.config, project.store
    return {
        "round": round_number,
        "project": config.project,
        "name": config.name,
        "base_model": config.model.model_path,
        "taskset_digest": project.tasks.digest,
        "data_digest": store.digest(round_number),
        "judge_version": store.judge_version(round_number),
        "config_digest": config_digest(config),
        "code_version": code_version(),
        "dagster_run_id": run_id,
    }


def algorithm_spec(project: Project) -> AlgorithmSpec:
    """The preset's choices, overridden by what the configuration says."""
    settings = project.config.algorithm
    return AlgorithmSpec(
        policy_loss=settings.policy_loss_fn or preset(settings.algorithm_type).policy_loss,
        policy_loss_args=settings.policy_loss_fn_args,
        loss_agg_mode=settings.loss_agg_mode,
        beta=settings.beta,
        kl_loss=settings.kl_loss_fn or "k2",
        entropy_coef=settings.entropy_coef,
    )


def optimizer_spec(settings: Optimizer, run_steps: int, grad_clip: float | None = None) -> OptimizerSpec:
    """AdamW as configured; a decay ends with the run where the configuration names no other end."""
    return OptimizerSpec(
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        clip_grad=settings.clip_grad if grad_clip is None else grad_clip,
        lr_scheduler_type=settings.lr_scheduler_type,
        lr_warmup_steps=settings.lr_warmup_steps,
        total_steps=settings.total_steps or run_steps,
    )


def steps_a_round(project: Project) -> int:
    """Optimiser steps of a round in which no row was dropped."""
    return math.ceil(project.experiences_a_round / project.train_batch_size)


def take_canary(project: Project, trainer: "TrainerClient", round_number: int) -> Canary:
    """What the weights that the trainer now holds answer on a few sequences of the round."""
    columns = project.store.read_rollouts(round_number, columns=["prompt_ids", "response_ids"]).slice(0, _CANARY_ROWS)
    sequences = [[*row["prompt_ids"], *row["response_ids"]] for row in columns.to_pylist()]
    return Canary(sequences, trainer.score(sequences))


def _targets(modules: str | list[str]) -> str | tuple[str, ...]:
    return modules if isinstance(modules, str) else tuple(modules)
