"""The request of a round's training: files, limits, specifications and lineage; equal for equal rows and settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rft_platform.algorithms.plugins import import_plugins, plugins_digest
from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import digest_json
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.load import config_digest
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.config.training_specs import optimizer_spec
from rft_platform.experience.file_names import round_key
from rft_platform.experience.selections import selection_file
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.code_version import code_version, user_code_of
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RowSelection, read, required, started_again, steps_before
from rft_platform.rounds.setup.connections import model_folder
from rft_platform.rounds.setup.demonstrations import EXPERTS, write_demonstrations
from rft_platform.training.protocol import TrainRequest

CORRECTIONS_UNTIL = "corrections_until"  #: lineage: the training read all corrections up to this round


def train_request(
    project: Project, parent: Policy, round_number: int, selection: RowSelection, dagster_run_id: str
) -> TrainRequest:
    """The request for the trainer; equal for the same round, rows and configuration.

    Raises StorageError if there is no active judgement.
    """
    config, store, policy = project.config, project.store, parent.name
    rounds = selection.rounds or [round_number]
    algorithm = spec_with_critic(project)
    start, before = started_again(store, round_number, policy), steps_before(store, round_number, policy)
    demonstrations = experts_file(project, algorithm, round_number)
    if demonstrations is None:  # an online project whose users have corrected nothing yet
        algorithm = replace(algorithm, expert_weight=None)
    return TrainRequest(
        parent=parent.folder,
        parent_version=parent.policy_version,
        output=str(project.checkpoints_of(policy)),
        algorithm=algorithm,
        optimizer=optimizer_spec(config.algorithm.optimizer, project.length.steps),
        rollouts=tuple(str(file) for number in rounds for file in store.rollout_files(number)),
        judged=tuple(str(_judged_file(store, number, selection)) for number in rounds),
        selection=str(selection_file(store, round_number, policy)),
        train_batch_size=project.batches.train_batch_size,
        max_tokens_per_pack=project.memory.max_tokens_per_pack,
        max_tokens_per_row=config.model.max_model_len,
        seed=config.seed + round_number,
        epochs=project.batches.epochs,
        fresh_optimizer=parent.policy_version == 0 or (start is not None and start.fresh_optimizer),
        lora=project.settings.lora,
        reference=reference_folder(project, algorithm, policy),
        teacher=teacher_folder(project),
        demonstrations=demonstrations,
        expert_batch_size=config.algorithm.experts.batch_size if config.algorithm.experts else None,
        save_interval=config.trainer.save_interval,
        save_state=_when_to_save(project, round_number, selection),
        save_hf_checkpoint=config.trainer.save_hf_checkpoint,
        max_checkpoints_to_keep=config.trainer.max_checkpoints_to_keep,
        lineage=lineage(project, round_number, selection, dagster_run_id, policy),
        steps_before=before if before > parent.policy_version else None,
    )


def _when_to_save(project: Project, round_number: int, selection: RowSelection) -> Literal["now", "later"]:
    """``later`` (in the background) if a next training continues from this state in memory, otherwise ``now``."""
    last = round_number >= project.rounds_budget or selection.last
    alternates = len(project.policies) > 1  # each policy's training replaces the state of another one
    return "now" if last or alternates or not project.config.trainer.save_in_background else "later"


def _judged_file(store: ExperienceStore, number: int, selection: RowSelection) -> Path:
    judged = store.judged_file(number, selection.judge_versions.get(number))
    if judged is None:
        key = round_key(number)
        raise StorageError(f"{key} has no judgement in force to train on: launch judge_job for {key}")
    return judged


def experts_file(project: Project, algorithm: AlgorithmSpec, round_number: int) -> str | None:
    """The file of demonstrations mixed into the rollouts; None if the algorithm uses none, or there are none.

    All rounds share the file of a dataset; the round's data position determines which part a round uses. In an online
    project without a dataset each round has a separate file with the corrections of users up to this round.
    """
    experts = project.config.algorithm.experts
    if algorithm.expert_weight is None or experts is None:
        return None
    if experts.path is None:
        model = Path(required(project.store, 0).folder)  # all policies have its tokenizer and chat template
        assert project.traffic is not None  # the check of the configuration
        corrections = project.traffic.experts(round_number, model)
        return None if corrections is None else str(corrections)
    target = project.store.round_folder(0) / EXPERTS
    write_demonstrations(experts, target, section="algorithm.experts")
    return str(target)


def _trains_on_corrections(project: Project) -> bool:
    """Whether the rounds of the project mix corrections of users into their rows."""
    experts = project.config.algorithm.experts
    return project.traffic is not None and experts is not None and experts.path is None


def lineage(
    project: Project, round_number: int, selection: RowSelection, dagster_run_id: str, policy: str = DEFAULT_POLICY
) -> dict[str, Any]:
    """Origin of a round's weights, stored in the checkpoint's manifest and the tags of its model version."""
    config, store = project.config, project.store
    judged, start = read(store, round_number).judged, started_again(store, round_number, policy)
    return {
        "round": round_number,
        "project": config.project,
        "name": config.name,
        "base_model": project.policies[policy].model_path,
        "policy": policy,
        **({"refused_versions": ", ".join(map(str, start.refused))} if start else {}),
        "algorithm": config.algorithm.algorithm_type,
        "taskset_digest": project.tasks.digest,
        **({CORRECTIONS_UNTIL: round_number} if _trains_on_corrections(project) else {}),
        **_data_lineage(store, selection),
        "config_digest": config_digest(config),
        "code_version": code_version(),
        "dagster_run_id": dagster_run_id,
        **({"plugins_digest": loaded_digest(config)} if config.algorithm.plugins else {}),
        **({"operators_version": judged.operators_version} if judged and judged.operators_version else {}),
        **user_code_of(store, selection.judge_versions),
    }


def _data_lineage(store: ExperienceStore, selection: RowSelection) -> dict[str, Any]:
    """The rows behind the weights."""
    versions = sorted(selection.judge_versions.items())
    digests = {str(number): store.digest(number, judge_version=version) for number, version in versions}
    return {
        "data_digest": digest_json([selection.sha256, digests]),
        "judge_version": ", ".join(sorted({version for _, version in versions})) or None,
        "row_selection": {
            "sha256": selection.sha256,
            "rows": selection.rows,
            "judge_versions": {str(number): version for number, version in versions},
            "digests": digests,
            "policy_versions": selection.policy_versions,
        },
    }


def loaded_digest(config: RftConfig) -> str | None:
    """Import the plugins and return the digest of their code; None without plugins."""
    import_plugins(config.algorithm.plugins)
    return plugins_digest(config.algorithm.plugins)


def reference_folder(project: Project, algorithm: AlgorithmSpec, policy: str = DEFAULT_POLICY) -> str | None:
    """The starting policy's folder if the algorithm needs a reference model; otherwise None."""
    always = project.settings.algorithm.reference == "always"
    needed = always or algorithm.beta or algorithm.kl_penalty is not None
    return required(project.store, 0, policy).folder if needed else None


def teacher_folder(project: Project) -> str | None:
    """The teacher's folder; None if the algorithm needs no teacher. Raises UserError if a needed teacher is not set."""
    settings = project.config.algorithm
    if not project.settings.algorithm.teacher:
        return None
    if settings.teacher_model_path is None:
        raise UserError(f"algorithm.teacher_model_path is not set: {settings.algorithm_type} learns from a teacher")
    return str(model_folder(project, settings.teacher_model_path, "algorithm.teacher_model_path"))


def spec_with_critic(project: Project) -> AlgorithmSpec:
    """The algorithm for the trainer, with the folder and the optimiser of its critic.

    The critic's learning-rate schedule ends with the project's last optimiser step.
    """
    spec, named = project.settings.spec, project.config.model.critic_model_path
    if spec.critic is None:
        return spec
    folder = None if named is None else str(model_folder(project, named, "model.critic_model_path"))
    optimizer = optimizer_spec(project.config.algorithm.critic, project.length.steps)
    return replace(spec, critic=replace(spec.critic, folder=folder, optimizer=optimizer))
