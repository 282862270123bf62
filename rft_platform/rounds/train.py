"""Train stage of a round: from its judged experiences to a published checkpoint.

``train`` selects the rows and builds the request; ``run_training`` has the trainer run it, stores the canary and the
result, and publishes the policy. An offline training uses ``run_training`` too.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from rft_platform.common.errors import UserError
from rft_platform.common.policy_names import DEFAULT_POLICY, stored_name
from rft_platform.common.progress import announce, report
from rft_platform.experience.file_names import round_key
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.canary import Canary
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Policy,
    RowSelection,
    Trained,
    publish,
    published,
    required,
    write,
)
from rft_platform.rounds.project.repair import repair_on_failure
from rft_platform.rounds.releases.training_start import settle_start
from rft_platform.rounds.selection.row_selection import select_rows
from rft_platform.rounds.setup.connections import free_gpus
from rft_platform.rounds.train_request import train_request
from rft_platform.training.protocol import StepEvent, TrainRequest

if TYPE_CHECKING:
    from rft_platform.training.service.trainer_client import TrainerClient

_CANARY_ROWS = 8


LOG = logging.getLogger(__name__)
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
) -> tuple[RowSelection, Trained]:
    """Select the rows of a round's training, run its optimiser steps and publish the resulting policy.

    A round in which no row has a gradient is recorded as a no-op: it publishes the parent's policy again.
    ``dagster_run_id`` is kept in the lineage. ``policy`` is the name of the policy to train.
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
    return selection, run_training(project, trainer, training)


def _canary_sequences(project: Project, round_number: int, policy: str = DEFAULT_POLICY) -> list[list[int]]:
    """The token ids of a few calls of the policy in the round, for the canary."""
    rows = project.store.read_rollouts(round_number, columns=["prompt_ids", "response_ids", "policy"])
    called = [index for index, name in enumerate(rows["policy"].to_pylist()) if name == policy][:_CANARY_ROWS]
    return [[*row["prompt_ids"], *row["response_ids"]] for row in rows.take(called).to_pylist()]


def run_training(project: Project, trainer: "TrainerClient", training: Training) -> Trained:
    """Run the optimiser steps and publish the resulting policy; the parent's weights if no row has a gradient."""
    store, parent = project.store, training.parent
    key = stored_name(round_key(training.round), parent.name, " ")
    steps: list[StepEvent] = []

    def on_step(event: StepEvent) -> None:
        if steps and steps[-1].told_again and not event.told_again:
            announce(f"{key} training: continues after step {steps[-1].step}")
        steps.append(event)
        done = event.step - training.request.counts_from
        watched = {name: event.metrics[name] for name in _WATCHED if name in event.metrics}
        report(f"{key} training", done, max(training.total_steps, done), **watched)

    report(f"{key} training", 0, max(training.total_steps, 1))
    free_gpus(project)
    with ExitStack() as weights:
        for policy in training.reads:
            weights.enter_context(repair_on_failure(project, policy))
        result = trainer.train(training.request, on_step)
    started, steps = perf_counter(), [replace(event, told_again=False) for event in steps]
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
    return trained


def refuse_if_next_round_is_trained(store: ExperienceStore, round_number: int) -> None:
    """Raise UserError if the next round is trained."""
    if published(store, round_number + 1) is not None:
        raise UserError(
            f"{round_key(round_number)} cannot be trained again, because the next round was trained after it: "
            "judge it again to compare judges, or start a project with another name"
        )


def _engine_mismatch(steps: Sequence[StepEvent]) -> float | None:
    """Mean |delta log-prob| in nats between the sampling engine and the trainer, for the same weights.

    It is measured in the first step of a round that explored with its parent; before later steps the weights changed.
    """
    first = steps[0].metrics if steps else {}
    return first.get("mismatch_abs") if first.get("staleness_max") == 0 else None


def _canary(trainer: "TrainerClient", sequences: list[list[int]]) -> Canary | None:
    """Log-probs of the weights that the trainer now holds; None without sequences."""
    return Canary(sequences, trainer.score(sequences)) if sequences else None
