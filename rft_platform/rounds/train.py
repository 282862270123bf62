"""Train stage of a round: from its judged experiences to a published checkpoint.

``train`` selects the rows and builds the request (files, limits, specifications and lineage); ``run_training`` has the
trainer run it, stores the canary and the result, and publishes the policy. An offline training uses ``run_training``
too.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from rft_platform.algorithms.plugins import import_plugins, plugins_digest
from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import digest_json
from rft_platform.common.policy_names import DEFAULT_POLICY, stored_name
from rft_platform.common.progress import announce, report
from rft_platform.config.load import config_digest
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.config.training_specs import optimizer_spec
from rft_platform.experience.file_names import round_key
from rft_platform.experience.selections import selection_file
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.canary import Canary
from rft_platform.rounds.project.code_version import code_version, user_code_of
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Policy,
    RoundRecord,
    RowSelection,
    Trained,
    publish,
    read,
    required,
    steps_before,
    write,
)
from rft_platform.rounds.project.repair import repair_on_failure
from rft_platform.rounds.releases.training_start import settle_start
from rft_platform.rounds.selection.row_selection import select_rows
from rft_platform.rounds.setup.connections import free_gpus, model_folder
from rft_platform.rounds.setup.demonstrations import EXPERTS
from rft_platform.training.protocol import StepEvent, TrainRequest

if TYPE_CHECKING:
    from rft_platform.training.service.trainer_client import TrainerClient


_CANARY_ROWS = 8


LOG = logging.getLogger(__name__)
CORRECTIONS_UNTIL = "corrections_until"  #: lineage: the training read all corrections up to this round
#: Metrics shown in the progress line.
_WATCHED = ("loss", "grad_norm", "entropy")


@dataclass(frozen=True, slots=True)
class Training:
    """A request for the trainer, and what the control plane needs to run it and to publish its result."""

    request: TrainRequest
    parent: Policy
    round: int
    total_steps: int  # expected optimiser steps, for the progress line
    reads: tuple[Policy, ...]  # policies whose weights the trainer reads; damaged ones are repaired on failure
    canary_sequences: Callable[[], list[list[int]]]  # returns the token ids for the canary of the new weights


def train(
    project: Project, trainer: "TrainerClient", round_number: int, dagster_run_id: str, policy: str = DEFAULT_POLICY
) -> tuple[RowSelection, Policy, Trained]:
    """Select the rows of a round's training, run its optimiser steps and publish the resulting policy.

    A round in which no row has a gradient is recorded as a no-op: it publishes the parent's policy again.
    ``dagster_run_id`` is kept in the lineage. ``policy`` is the name of the policy to train. Returns the rows, the
    published policy and the training's result.
    """
    parent = settle_start(project, round_number, policy)
    selection = select_rows(project, round_number, parent)
    request = train_request(project, parent, round_number, selection, dagster_run_id)
    training = Training(
        request=request,
        parent=parent,
        round=round_number,
        total_steps=selection.steps,
        reads=(parent, *([required(project.store, 0, policy)] if request.reference else [])),
        canary_sequences=partial(_canary_sequences, project, round_number, policy),
    )
    return selection, *run_training(project, trainer, training)


def _canary_sequences(project: Project, round_number: int, policy: str = DEFAULT_POLICY) -> list[list[int]]:
    """The token ids of a few calls of the policy in the round, for the canary."""
    rows = project.store.read_rollouts(round_number, columns=["prompt_ids", "response_ids", "policy"])
    called = [index for index, name in enumerate(rows["policy"].to_pylist()) if name == policy][:_CANARY_ROWS]
    return [[*row["prompt_ids"], *row["response_ids"]] for row in rows.take(called).to_pylist()]


def run_training(project: Project, trainer: "TrainerClient", training: Training) -> tuple[Policy, Trained]:
    """Run the optimiser steps and publish the resulting policy: the parent's weights if no row has a gradient.

    Returns the policy and the training's result.
    """
    store, parent = project.store, training.parent
    key = stored_name(round_key(training.round), parent.name, " ")
    steps: list[StepEvent] = []

    def on_step(event: StepEvent) -> None:
        done = event.step - training.request.counts_from
        total = max(training.total_steps, done)
        if steps and steps[-1].reported_before and not event.reported_before:
            announce(f"{key} training: continues after step {done - 1} of {total}")
        steps.append(event)
        if not event.reported_before:
            watched = {name: event.metrics[name] for name in _WATCHED if name in event.metrics}
            report(f"{key} training", done, total, **watched)

    def on_repeat(count: int, trainings: int) -> None:
        earlier = "an earlier training" if trainings == 1 else f"{trainings} earlier trainings"
        announce(f"{key} training: repeats {count} steps of {earlier}, whose trainer state was not saved")

    report(f"{key} training", 0, max(training.total_steps, 1))
    free_gpus(project)
    with ExitStack() as weights:
        for policy in training.reads:
            weights.enter_context(repair_on_failure(project, policy))
        result = trainer.train(training.request, on_step, on_repeat)
    started, steps = perf_counter(), [replace(event, reported_before=False) for event in steps]
    if too_long := int(result.metrics.get("rows_too_long", 0)):
        LOG.warning("%s: %d rows longer than max_model_len are left out of the training", key, too_long)
    if other := int(result.metrics.get("rows_other_sampling", 0)):
        LOG.warning(
            "%s: %d rows sampled with temperature 0, top_p or top_k are not trained on: their log-probs are not those "
            "of the policy's distribution",
            key,
            other,
        )
    policy = Policy(
        folder=result.checkpoint,
        policy_version=result.policy_version,
        weights_digest=result.weights_digest,
        round=training.round,
        canary=parent.canary if result.steps == 0 else _canary(trainer, training.canary_sequences()),
        model_version=parent.model_version if result.steps == 0 else None,
        name=parent.name,
    )
    trained = Trained(
        **{**asdict(result), "seconds": {**result.seconds, "canary": perf_counter() - started}},
        step_events=steps,
        engine_mismatch=_engine_mismatch(steps),
        lineage=training.request.lineage,
    )
    write(store, training.round, trained, parent.name)
    publish(store, policy)
    return policy, trained


def _engine_mismatch(steps: Sequence[StepEvent]) -> float | None:
    """Mean |delta log-prob| in nats between the sampling engine and the trainer, for the same weights.

    It is measured in the first step of a round that explored with its parent; before later steps the weights changed.
    """
    first = steps[0].metrics if steps else {}
    return first.get("mismatch_abs") if first.get("staleness_max") == 0 else None


def _canary(trainer: "TrainerClient", sequences: list[list[int]]) -> Canary | None:
    """Log-probs of the weights that the trainer now holds; None without sequences."""
    return Canary(sequences, trainer.score(sequences)) if sequences else None


def train_request(
    project: Project, parent: Policy, round_number: int, selection: RowSelection, dagster_run_id: str
) -> TrainRequest:
    """The request for the trainer; equal for equal rows, configuration and code, apart from the id of the Dagster run.

    Raises StorageError if no judgement is in force.
    """
    config, store, policy = project.config, project.store, parent.name
    algorithm, save_state = spec_with_critic(project), _when_to_save(project, round_number, selection)
    demonstrations = experts_file(project, algorithm, round_number)
    if demonstrations is None:  # an online project whose users have corrected nothing yet
        algorithm = replace(algorithm, expert_weight=None)
    before, rounds = steps_before(store, round_number, policy), selection.rounds or [round_number]
    records = {number: read(store, number) for number in {round_number, *rounds}}
    start = records[round_number].started_again(policy)
    origin = lineage(project, records, round_number, selection, dagster_run_id, policy)
    judged = {number: store.judged_file(number, selection.judge_versions.get(number)) for number in rounds}
    for key in (round_key(number) for number, file in judged.items() if file is None):
        raise StorageError(f"{key} has no judgement in force to train on: launch judge_job for {key}")
    return TrainRequest(
        parent=parent.folder,
        parent_version=parent.policy_version,
        output=str(project.checkpoints_of(policy)),
        algorithm=algorithm,
        optimizer=optimizer_spec(
            config.algorithm.optimizer, project.length.steps, start=project.settings.critic_only_steps
        ),
        rollouts=tuple(str(file) for number in rounds for file in store.rollout_files(number)),
        judged=tuple(map(str, judged.values())),
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
        expert_seed=None if _trains_on_corrections(project) else config.seed,
        save_interval=config.trainer.save_interval,
        save_state=save_state,
        save_hf_checkpoint=config.trainer.save_hf_checkpoint,
        max_checkpoints_to_keep=config.trainer.max_checkpoints_to_keep,
        lineage=origin,
        steps_before=before if before > parent.policy_version else None,
    )


def _when_to_save(project: Project, round_number: int, selection: RowSelection) -> Literal["now", "later"]:
    """``later`` (in the background) if a next training continues from this state in memory, otherwise ``now``."""
    last = round_number >= project.rounds_budget or selection.last
    alternates = len(project.policies) > 1  # each policy's training replaces the state of another one
    return "now" if last or alternates or not project.config.trainer.save_in_background else "later"


def experts_file(project: Project, algorithm: AlgorithmSpec, round_number: int) -> str | None:
    """The file of demonstrations mixed into the rollouts; None if the algorithm uses none, or there are none.

    All rounds share the file of a dataset, which the start of the project writes, and one shuffled order of it
    (``expert_seed``): a round continues after the demonstrations that its parent has seen. In an online project without
    a dataset each round has a separate file with the corrections of users up to this round, in a new random order.
    """
    experts = project.config.algorithm.experts
    if algorithm.expert_weight is None or experts is None:
        return None
    if experts.path is None:
        model = Path(required(project.store, 0).folder)  # all policies have its tokenizer and chat template
        assert project.traffic is not None  # the check of the configuration
        corrections = project.traffic.experts(round_number, model)
        return None if corrections is None else str(corrections)
    return str(project.store.round_folder(0) / EXPERTS)


def _trains_on_corrections(project: Project) -> bool:
    """Whether the rounds of the project mix corrections of users into their rows."""
    experts = project.config.algorithm.experts
    return project.traffic is not None and experts is not None and experts.path is None


def lineage(
    project: Project,
    records: Mapping[int, RoundRecord],
    round_number: int,
    selection: RowSelection,
    dagster_run_id: str,
    policy: str = DEFAULT_POLICY,
) -> dict[str, Any]:
    """Origin of a round's weights, stored in the checkpoint's manifest and the tags of its model version.

    ``records`` are those of the round and of the rounds that the selection takes rows of.
    """
    config, judged, start = project.config, records[round_number].judged, records[round_number].started_again(policy)
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
        "config_digest": config_digest(config),
        "code_version": code_version(),
        **user_code_of((records[number], version) for number, version in selection.judge_versions.items()),
        "dagster_run_id": dagster_run_id,
        **({"plugins_digest": loaded_digest(config)} if config.algorithm.plugins else {}),
        **({"operators_version": judged.operators_version} if judged and judged.operators_version else {}),
        **_data_lineage(project.store, selection),
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
