"""The train stage of a round with several policies: train each further policy on its own rows and register it."""

from dataclasses import replace
from typing import TYPE_CHECKING

from rft_platform.rounds.policy import Policy, parent_of, publish
from rft_platform.rounds.project import Project
from rft_platform.rounds.register import register
from rft_platform.rounds.train import lineage, refuse_with_successor, train

if TYPE_CHECKING:
    from rft_platform.registry.models import ModelRegistry
    from rft_platform.training.group import TrainerClient
    from rft_platform.training.protocol import TrainResult


def train_further(
    project: Project, trainer: "TrainerClient", registry: "ModelRegistry", round_number: int, run_id: str
) -> dict[str, tuple[Policy, "TrainResult | None"]]:
    """Train each further policy on its own rows, one after the other, and register the results.

    The first policy is trained after them, because its note marks the round as trained. A repeated call does not repeat
    a training that is already published. A policy with ``train: false`` is published unchanged, with None as its
    result.
    """
    store = project.store
    refuse_with_successor(store, round_number)
    done: dict[str, tuple[Policy, TrainResult | None]] = {}
    for entry in project.config.policies:
        if not entry.train:
            kept = replace(parent_of(store, round_number, entry.name), round=round_number)
            publish(store, kept)
            done[entry.name] = kept, None
            continue
        result, steps = train(project, trainer, round_number, run_id, entry.name)
        made_of = lineage(project, round_number, run_id, entry.name)
        policy = register(project, registry, round_number, result, steps, made_of, entry.name)
        done[entry.name] = policy, result
    return done
