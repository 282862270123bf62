"""Training of a round: from its judged experiences to a published checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.config.load import config_digest
from rft_platform.config.trainer import Optimizer
from rft_platform.errors import StorageError, UserError
from rft_platform.experience.rounds import round_key
from rft_platform.experience.selections import selection_file
from rft_platform.experience.store import ExperienceStore
from rft_platform.files import digest_json
from rft_platform.rounds.algorithm import algorithm_spec, loaded_digest
from rft_platform.rounds.demonstrations import write_demonstrations
from rft_platform.rounds.judge import NOTE as JUDGED
from rft_platform.rounds.landing import selection_note
from rft_platform.rounds.mend import refuse_damaged_rows
from rft_platform.rounds.policy import Policy, parent_of, required
from rft_platform.rounds.processes import model_folder
from rft_platform.rounds.project import Project
from rft_platform.rounds.provenance import code_version
from rft_platform.rounds.row_selection import rounds_of, settle
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
    project: Project, trainer: "TrainerClient", round_number: int, run_id: str, policy: str | None = None
) -> tuple[TrainResult, list[StepEvent]]:
    """Run the optimiser steps of a round and publish the resulting policy.

    A round in which no row has a gradient is recorded as a no-op: its policy is its parent's. ``run_id`` is the
    orchestrator's run id, kept in the lineage. ``policy`` selects a further policy; None is the first.
    """
    store = project.store
    refuse_with_successor(store, round_number)
    parent = parent_of(store, round_number, policy)
    selection = settle(project, round_number, parent) if project.config.selects_rows else None
    for number in rounds_read(round_number, selection):
        refuse_damaged_rows(project, number, rests_on="judge")
    request = train_request(project, parent, round_number, run_id)
    training = Training(
        request=request,
        parent=parent,
        round=round_number,
        total_steps=steps_expected(project, round_number) if selection is None else selection["steps"],
        selection=selection,
        reads=(parent, *([required(store, 0, policy)] if request.reference else [])),
        canary_sequences=partial(_canary_sequences, project, round_number, policy),
    )
    return run_training(project, trainer, training)


def train_request(project: Project, parent: Policy, round_number: int, run_id: str) -> TrainRequest:
    """The request for the trainer; equal for the same round, rows and configuration.

    Raises StorageError if there is no active judgement.
    """
    config, store, policy = project.config, project.store, parent.name
    selection = selection_note(store, round_number, policy) if config.selects_rows else None
    rounds = rounds_read(round_number, selection)
    algorithm = spec_with_critic(project)
    return TrainRequest(
        parent=parent.folder,
        parent_version=parent.policy_version,
        output=str(project.checkpoints_of(policy)),
        algorithm=algorithm,
        optimizer=optimizer_spec(config.algorithm.optimizer, project.length.steps, config.trainer.grad_clip),
        rollouts=tuple(str(file) for number in rounds for file in store.rollout_files(number)),
        judged=tuple(str(_judged_file(store, number, selection)) for number in rounds),
        selection=None if selection is None else str(selection_file(store, round_number, policy)),
        train_batch_size=project.batches.train_batch_size,
        max_tokens_per_pack=config.trainer.max_token_len_per_gpu,
        max_tokens_per_row=config.model.max_model_len,
        seed=config.seed + round_number,
        fresh_optimizer=parent.policy_version == 0,
        lora=lora_spec(project),
        reference=reference_folder(project, algorithm, policy),
        teacher=teacher_folder(project),
        demonstrations=experts_file(project, algorithm),
        expert_batch_size=config.algorithm.experts.batch_size if config.algorithm.experts else None,
        save_interval=config.trainer.save_interval,
        save_hf_checkpoint=config.trainer.save_hf_checkpoint,
        max_checkpoints_to_keep=config.trainer.max_checkpoints_to_keep,
        lineage=lineage(project, round_number, run_id, policy),
    )


def rounds_read(round_number: int, selection: Mapping[str, Any] | None) -> list[int]:
    """The rounds whose files a training reads: its own, or those of its row selection."""
    return (selection and rounds_of(selection)) or [round_number]


def _judged_file(store: ExperienceStore, number: int, selection: Mapping[str, Any] | None) -> Path:
    settled = {} if selection is None else selection["judge_versions"]
    judged = store.judged_file(number, settled.get(str(number)))
    if judged is None:
        key = round_key(number)
        raise StorageError(f"{key} has no judgement in force, which a training reads: launch judge_job for {key}")
    return judged


def reference_folder(project: Project, algorithm: AlgorithmSpec, policy: str | None = None) -> str | None:
    """The starting policy's folder if the algorithm needs a reference model; otherwise None."""
    always = project.settings.algorithm.reference == "always"
    needed = always or algorithm.beta or algorithm.kl_penalty is not None
    return required(project.store, 0, policy).folder if needed else None


def teacher_folder(project: Project) -> str | None:
    """The teacher's folder; None if the algorithm has no teacher. Raises UserError if none is configured."""
    settings = project.config.algorithm
    if not project.settings.algorithm.teacher:
        return None
    if settings.teacher_model_path is None:
        raise UserError(f"algorithm.teacher_model_path is not set: {settings.algorithm_type} learns from a teacher")
    return str(model_folder(project, settings.teacher_model_path, "algorithm.teacher_model_path"))


def experts_file(project: Project, algorithm: AlgorithmSpec) -> str | None:
    """The file of demonstrations mixed into the rollouts; None if the algorithm uses none.

    All rounds share the file; a round's part of it follows from its data position.
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


def lineage(project: Project, round_number: int, run_id: str, policy: str | None = None) -> dict[str, Any]:
    """Origin of a round's weights, stored in the checkpoint's manifest and the tags of its model version."""
    config, store = project.config, project.store
    selection = selection_note(store, round_number, policy) if config.selects_rows else None
    bases: dict[str | None, str] = {entry.name: entry.model_path for entry in config.policies}
    return {
        "round": round_number,
        "project": config.project,
        "name": config.name,
        "base_model": bases.get(policy, config.model.model_path),
        **({} if policy is None else {"policy": policy}),
        "algorithm": config.algorithm.algorithm_type,
        "taskset_digest": project.tasks.digest,
        **_data_lineage(store, round_number, selection),
        "config_digest": config_digest(config),
        "code_version": code_version(),
        "dagster_run_id": run_id,
        **({"plugins_digest": loaded_digest(config)} if config.algorithm.plugins else {}),
        **_operators(store, round_number),
    }


def _data_lineage(store: ExperienceStore, number: int, selection: Mapping[str, Any] | None) -> dict[str, Any]:
    """The rows behind the weights: those of the round, or those of its row selection file."""
    if selection is None:
        return {"data_digest": store.digest(number), "judge_version": store.judge_version(number)}
    versions = {int(n): version for n, version in selection["judge_versions"].items()}
    digests = {str(n): store.digest(n, judge_version=version) for n, version in sorted(versions.items())}
    every = sorted(set(versions.values()))
    return {
        "data_digest": digest_json([selection["sha256"], digests]),
        "judge_version": every[0] if len(every) == 1 else ", ".join(every) or None,
        "row_selection": {
            "sha256": selection["sha256"],
            "rows": selection["rows"],
            "judge_versions": selection["judge_versions"],
            "digests": digests,
            "policy_versions": selection["policy_versions"],
        },
    }


def _operators(store: ExperienceStore, round_number: int) -> dict[str, str]:
    """The version of the operators behind the judgement of a round; empty if there were none."""
    version = (store.read_note(round_number, "judge") or {}).get("operators_version")
    return {"operators_version": version} if version else {}


def spec_with_critic(project: Project) -> AlgorithmSpec:
    """The configured algorithm, with its critic settings if it has a critic."""
    spec = algorithm_spec(project.settings)
    return spec if spec.critic is None else replace(spec, critic=critic_spec(project))


def critic_spec(project: Project) -> CriticSpec:
    """The configured critic. Its schedule counts the critic's own updates, as many as the run has steps."""
    settings, named = project.config.algorithm.critic, project.config.model.critic_model_path
    return CriticSpec(
        folder=None if named is None else str(model_folder(project, named, "model.critic_model_path")),
        optimizer=optimizer_spec(settings, project.length.steps),
        value_clip=settings.value_clip,
        warmup_steps=settings.warmup_steps,
    )


def optimizer_spec(settings: Optimizer, run_steps: int, grad_clip: float | None = None) -> OptimizerSpec:
    """AdamW as configured; a decay ends with the run unless the configuration sets another end.

    A run that ends within its warm-up has no decay: its learning rates are those at the start of a longer run.
    """
    return OptimizerSpec(
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        clip_grad=settings.clip_grad if grad_clip is None else grad_clip,
        lr_scheduler_type=settings.lr_scheduler_type,
        lr_warmup_steps=settings.lr_warmup_steps,
        total_steps=settings.total_steps or max(run_steps, settings.lr_warmup_steps + 1),
    )


def steps_expected(project: Project, round_number: int) -> int:
    """Expected optimiser steps for a round's rows; rows without a gradient are still counted."""
    judged = project.store.read_note(round_number, JUDGED) or {}
    rows = judged.get("rows", 0) - judged.get("dropped_rows", 0) if not project.config.policies else 0
    return math.ceil((rows or project.batches.experiences_a_round) / project.batches.train_batch_size)


def _canary_sequences(project: Project, round_number: int, policy: str | None = None) -> list[list[int]]:
    """A few whole sequences of the round, from the policy's own calls."""
    rows = project.store.read_rollouts(round_number, columns=["prompt_ids", "response_ids", "policy"])
    called = [index for index, name in enumerate(rows["policy"].to_pylist()) if name == policy][:_CANARY_ROWS]
    return [[*row["prompt_ids"], *row["response_ids"]] for row in rows.take(called).to_pylist()]


def _targets(modules: str | list[str]) -> str | tuple[str, ...]:
    return modules if isinstance(modules, str) else tuple(modules)
