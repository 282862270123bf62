"""The policies of section ``policies``: published at the start, served with the right weights, trained each apart."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.auxiliary import awake
from rft_platform.rounds.mend import mending
from rft_platform.rounds.policy import Policy, deploy, parent_of, publish, published, required, snapshot_of
from rft_platform.rounds.processes import connect_policies, start_folder
from rft_platform.rounds.project import Project
from rft_platform.rounds.register import register
from rft_platform.rounds.run_training import refuse_with_successor
from rft_platform.rounds.train import lineage, train
from rft_platform.weights import digest_weights

if TYPE_CHECKING:
    from rft_platform.registry.models import ModelRegistry
    from rft_platform.training.group import TrainerClient
    from rft_platform.training.protocol import TrainResult


def publish_starts(project: Project) -> None:
    """Publish version 0 of each further policy, as the model that it starts from; what was published before is kept."""
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
    """Engines that serve exactly these further policies, by name; an empty dict where there are none.

    Engines are found where they run, else started side by side; each is compared with the trainer's log-probs after its
    weights changed. Raises as ``deploy`` does, and EngineError where an engine does not come up.
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
    """Train each further policy on its own rows, one after the other, and register what comes of it.

    The first policy is trained after them: its note says that the round has trained. A repeated call trains none again
    that had been published. One that is not to be trained is published as it was, without a result.
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
    """Tell the model versions that played a round's evaluation what it said of the round."""
    for name, policy in ended_with(project, round_number).items():
        if policy.model_version is not None:
            registry.sibling(name).annotate(int(policy.model_version), scores)
