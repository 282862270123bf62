"""Training of a round: from its judged experiences to a published checkpoint."""

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rft_platform.config.load import config_digest
from rft_platform.config.trainer import Optimizer
from rft_platform.errors import StorageError, UserError
from rft_platform.experience.rounds import round_key
from rft_platform.rounds.algorithm import chosen_algorithm, loaded_digest, spec_of
from rft_platform.rounds.demonstrations import write_demonstrations
from rft_platform.rounds.mend import refuse_damaged_rows
from rft_platform.rounds.policy import Policy, parent_of, required
from rft_platform.rounds.processes import model_folder
from rft_platform.rounds.project import Project
from rft_platform.rounds.provenance import code_version
from rft_platform.rounds.run_training import Training, refuse_with_successor, run_training
from rft_platform.training.protocol import (
    AlgorithmSpec,
    CriticSpec,
    LoraSpec,
    OptimizerSpec,
    StepEvent,
    TrainRequest,
    TrainResult,
)

if TYPE_CHECKING:
    from rft_platform.training.group import TrainerClient

_CANARY_ROWS = 8


def train(
    project: Project, trainer: "TrainerClient", round_number: int, run_id: str
) -> tuple[TrainResult, list[StepEvent]]:
    """Run the optimiser steps of a round and publish the policy they lead to.

    A round whose rewards are all equal is a recorded no-op: its policy is its parent's. ``run_id`` is the
    orchestrator's name for this run, kept in the lineage.
    """
    store = project.store
    refuse_with_successor(store, round_number)
    parent = parent_of(store, round_number)
    refuse_damaged_rows(project, round_number, rests_on="judge")
    request = train_request(project, parent, round_number, run_id)
    training = Training(
        request=request,
        parent=parent,
        round=round_number,
        total_steps=steps_a_round(project),
        reads=(parent, *([required(store, 0)] if request.reference else [])),
        canary_sequences=partial(_canary_sequences, project, round_number),
    )
    return run_training(project, trainer, training)


def train_request(project: Project, parent: Policy, round_number: int, run_id: str) -> TrainRequest:
    """What the trainer is asked for: the same for the same round, rows and configuration.

    Raises StorageError where no judgement is in force.
    """
    config, store = project.config, project.store
    rollouts, judged = store.rollout_files(round_number), store.judged_file(round_number)
    if judged is None:
        key = round_key(round_number)
        raise StorageError(f"{key} has no judgement in force, which its training reads: launch judge_job for {key}")
    algorithm = algorithm_spec(project)
    return TrainRequest(
        parent=parent.folder,
        parent_version=parent.policy_version,
        output=str(project.checkpoints),
        algorithm=algorithm,
        optimizer=optimizer_spec(
            config.algorithm.optimizer, project.rounds_budget * steps_a_round(project), config.trainer.grad_clip
        ),
        rollouts=tuple(str(file) for file in rollouts),
        judged=(str(judged),),
        train_batch_size=project.train_batch_size,
        max_tokens_per_pack=config.trainer.max_token_len_per_gpu,
        max_tokens_per_row=config.model.max_model_len,
        seed=config.seed + round_number,
        fresh_optimizer=parent.policy_version == 0,
        lora=lora_spec(project),
        reference=reference_folder(project, algorithm),
        teacher=teacher_folder(project),
        demonstrations=experts_file(project, algorithm),
        expert_batch_size=config.algorithm.experts.batch_size if config.algorithm.experts else None,
        save_interval=config.trainer.save_interval,
        save_hf_checkpoint=config.trainer.save_hf_checkpoint,
        max_checkpoints_to_keep=config.trainer.max_checkpoints_to_keep,
        lineage=lineage(project, round_number, run_id),
    )


def reference_folder(project: Project, algorithm: AlgorithmSpec) -> str | None:
    """The starting policy's folder where the algorithm measures a distance to it; None where it does not."""
    always = chosen_algorithm(project.config).reference == "always"
    needed = always or algorithm.beta or algorithm.kl_penalty is not None
    return required(project.store, 0).folder if needed else None


def teacher_folder(project: Project) -> str | None:
    """The teacher's folder where the algorithm learns from one; UserError where the configuration names none."""
    settings = project.config.algorithm
    if not chosen_algorithm(project.config).teacher:
        return None
    if settings.teacher_model_path is None:
        raise UserError(f"algorithm.teacher_model_path is not set: {settings.algorithm_type} learns from a teacher")
    return str(model_folder(project, settings.teacher_model_path, "algorithm.teacher_model_path"))


def experts_file(project: Project, algorithm: AlgorithmSpec) -> str | None:
    """The demonstrations that are mixed in among the rollouts; None where the algorithm takes none.

    The same file for every round; a round's part of it follows from its data position.
    """
    experts = project.config.algorithm.experts
    if algorithm.expert_weight is None or experts is None:
        return None
    target = project.store.round_folder(0) / "experts.parquet"
    write_demonstrations(experts, target, key="algorithm.experts.path")
    return str(target)


def lora_spec(project: Project) -> LoraSpec | None:
    """The adapter to train; None: the full weights."""
    lora = project.config.model.lora_configs[0] if project.config.model.lora_configs else None
    return None if lora is None else LoraSpec(lora.lora_rank, lora.lora_alpha, _targets(lora.target_modules))


def lineage(project: Project, round_number: int, run_id: str) -> dict[str, Any]:
    """What made a round's weights: kept in the checkpoint's manifest and in the tags of its model version."""
    config, store = project.config, project.store
    return {
        "round": round_number,
        "project": config.project,
        "name": config.name,
        "base_model": config.model.model_path,
        "algorithm": config.algorithm.algorithm_type,
        "taskset_digest": project.tasks.digest,
        "data_digest": store.digest(round_number),
        "judge_version": store.judge_version(round_number),
        "config_digest": config_digest(config),
        "code_version": code_version(),
        "dagster_run_id": run_id,
        **({"plugins_digest": loaded_digest(config)} if config.algorithm.plugins else {}),
    }


def algorithm_spec(project: Project) -> AlgorithmSpec:
    """The preset's choices, overridden by what the configuration says."""
    spec = spec_of(project.config)
    return spec if spec.critic is None else replace(spec, critic=critic_spec(project))


def critic_spec(project: Project) -> CriticSpec:
    """The critic as configured; its schedule counts its own updates, as many as the run has steps."""
    settings, named = project.config.algorithm.critic, project.config.model.critic_model_path
    return CriticSpec(
        folder=None if named is None else str(model_folder(project, named, "model.critic_model_path")),
        optimizer=optimizer_spec(settings, project.rounds_budget * steps_a_round(project)),
        value_clip=settings.value_clip,
        warmup_steps=settings.warmup_steps,
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


def _canary_sequences(project: Project, round_number: int) -> list[list[int]]:
    """A few whole sequences of the round."""
    columns = project.store.read_rollouts(round_number, columns=["prompt_ids", "response_ids"]).slice(0, _CANARY_ROWS)
    return [[*row["prompt_ids"], *row["response_ids"]] for row in columns.to_pylist()]


def _targets(modules: str | list[str]) -> str | tuple[str, ...]:
    return modules if isinstance(modules, str) else tuple(modules)
