"""Further policies (section ``policies``): publish their start, serve the right weights, and train each separately."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rft_platform.checkpoint_files import digest_weights
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.auxiliary import awake
from rft_platform.rounds.mend import mending
from rft_platform.rounds.policy import Policy, deploy, parent_of, publish, published, required, snapshot_of
from rft_platform.rounds.processes import connect_policies, start_folder
from rft_platform.rounds.project import Project
from rft_platform.rounds.register import register
from rft_platform.rounds.run_training import refuse_with_successor
from rft_platform.rounds.train import lineage, train

if TYPE_CHECKING:
    from rft_platform.registry.models import ModelRegistry
    from rft_platform.training.group import TrainerClient
    from rft_platform.training.protocol import TrainResult


def publish_starts(project: Project) -> None:
    """Publish version 0 of each further policy, its base model; keep what is already published."""
    for entry in project.config.policies:
        if published(project.store, 0, entry.name) is None:
            folder = start_folder(project, entry)
            publish(project.store, Policy(str(folder), 0, digest_weights(folder), round=0, name=entry.name))


def explored_with(project: Project, round_number: int) -> dict[str, Policy]:
    """The further policies that a round explores with, by name."""
    return {entry.name: snapshot_of(project.store, round_number, entry.name) for entry in project.config.policies}


def ended_with(project: Project, round_number: int) -> dict[str, Policy]:
    """The further policies that a round has published, by name."""
    return {entry.name: required(project.store, round_number, entry.name) for entry in project.config.policies}


@contextmanager
def serving_policies(project: Project, policies: Mapping[str, Policy]) -> Iterator[dict[str, PolicyEngine]]:
    """Yield engines that serve exactly these further policies, by name; an empty dict if there are none.

    Running engines are reused; missing ones are started in parallel. After a weight change each engine is compared with
    the trainer's log-probs. Raises the errors of ``deploy``, and EngineError if an engine does not start.
    """
    if not project.config.policies:
        yield {}
        return
    clients = connect_policies(project)
    with awake(list(clients.values())):
        for name, client in clients.items():
            with mending(project, policies[name]):
                deploy(client, policies[name])
        yield dict(clients)


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


def annotate_further(project: Project, registry: "ModelRegistry", round_number: int, scores: Mapping[str, Any]) -> None:
    """Add the scores of a round's evaluation to the model versions of the further policies that took part."""
    for name, policy in ended_with(project, round_number).items():
        if policy.model_version is not None:
            registry.sibling(name).annotate(int(policy.model_version), scores)
