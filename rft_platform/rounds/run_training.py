"""Run a training request: report its steps, compute the canary, write the train note, and publish the policy."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rft_platform.errors import UserError
from rft_platform.experience.rounds import round_key
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.canary import Canary
from rft_platform.progress import report, tell
from rft_platform.rounds.mend import mending
from rft_platform.rounds.policy import Policy, note_of, publish, published
from rft_platform.rounds.project import Project
from rft_platform.training.protocol import StepEvent, TrainRequest, TrainResult

if TYPE_CHECKING:
    from rft_platform.training.group import TrainerClient

LOG = logging.getLogger(__name__)
NOTE = "train"

#: Metrics shown in the progress line.
_WATCHED = ("loss", "grad_norm", "entropy")


@dataclass(frozen=True, slots=True)
class Training:
    """A training request with what the control plane knows about it."""

    request: TrainRequest
    parent: Policy
    round: int
    total_steps: int  # expected optimiser steps, for the progress line
    reads: tuple[Policy, ...]  # policies whose weights the trainer reads; damaged ones are repaired on failure
    canary_sequences: Callable[[], list[list[int]]]  # token ids on which the new weights are compared
    selection: Mapping[str, Any] | None = None  # the settled row selection, if rows are selected one by one


def run_training(project: Project, trainer: "TrainerClient", training: Training) -> tuple[TrainResult, list[StepEvent]]:
    """Run the optimiser steps and publish the resulting policy; the parent's weights if no row has a gradient."""
    store, parent = project.store, training.parent
    key = round_key(training.round) if parent.name is None else f"{round_key(training.round)} {parent.name}"
    steps: list[StepEvent] = []

    def on_step(event: StepEvent) -> None:
        if steps and steps[-1].told_again and not event.told_again:
            tell(f"{key} training: going on after step {steps[-1].step}")
        steps.append(event)
        done = event.step - parent.policy_version
        watched = {name: event.metrics[name] for name in _WATCHED if name in event.metrics}
        report(f"{key} training", done, max(training.total_steps, done), **watched)

    report(f"{key} training", 0, max(training.total_steps, 1))
    with ExitStack() as weights:
        for policy in training.reads:
            weights.enter_context(mending(project, policy))
        result = trainer.train(training.request, on_step)
    started, steps = perf_counter(), [replace(event, told_again=False) for event in steps]
    if too_long := int(result.metrics.get("rows_too_long", 0)):
        LOG.warning("%s: %d rows longer than max_model_len left out of the training", key, too_long)
    policy = Policy(
        folder=result.checkpoint,
        policy_version=result.policy_version,
        weights_digest=result.weights_digest,
        round=training.round,
        canary=parent.canary if result.steps == 0 else _canary(trainer, training.canary_sequences()),
        name=parent.name,
    )
    result = replace(result, seconds={**result.seconds, "canary": perf_counter() - started})
    events = [asdict(event) for event in steps]
    note = {**asdict(result), "step_events": events, "engine_mismatch": engine_mismatch(steps)}
    if (judge_version := training.request.lineage.get("judge_version")) is not None:
        note["judge_version"] = judge_version
    if training.selection is not None:
        note["row_selection"] = dict(training.selection)
    store.write_note(training.round, note_of(NOTE, parent.name), note)
    publish(store, policy)
    return result, steps


def refuse_with_successor(store: ExperienceStore, round_number: int) -> None:
    """Raise UserError if the next round was trained from this round's weights."""
    if published(store, round_number + 1) is not None:
        raise UserError(
            f"{round_key(round_number)} has a successor that was trained from its weights: training it again would "
            "change what those came from; judge it anew to compare, or start a project of another name"
        )


def engine_mismatch(steps: Sequence[StepEvent]) -> float | None:
    """Mean |delta log-prob| in nats between the sampling engine and the trainer, for exactly the same weights.

    Only the first step shows it, and only if the round explored with its parent; later steps have changed the policy.
    """
    first = steps[0].metrics if steps else {}
    return first.get("mismatch_abs") if first.get("staleness_max") == 0 else None


def _canary(trainer: "TrainerClient", sequences: list[list[int]]) -> Canary | None:
    """Log-probs of the weights that the trainer now holds; None without sequences."""
    return Canary(sequences, trainer.score(sequences)) if sequences else None
