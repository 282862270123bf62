"""Which policy a round explores with, found in the rounds' records, never by the newest file; its way to the engine."""

from pathlib import Path

from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.canary import update_checked
from rft_platform.inference.interface import PolicyEngine
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.object_store.mirror import fetch_missing
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, needed, published, read, required, snapshot_of, write_snapshot


def explorer_of(store: ExperienceStore, round_number: int, offset_rounds: int, name: str = DEFAULT_POLICY) -> Policy:
    """The policy that round k explores with: the newest one of the rounds ``k - 1 - offset_rounds`` to ``k - 1``."""
    oldest = max(0, round_number - 1 - offset_rounds)
    for candidate in range(round_number - 1, oldest - 1, -1):
        policy = published(store, candidate, name)
        if policy is not None:
            return policy
    return needed(None, round_number, oldest)


def take_snapshot(
    store: ExperienceStore,
    round_number: int,
    offset_rounds: int,
    held: Policy | None = None,
    name: str = DEFAULT_POLICY,
) -> Policy:
    """Choose the policy that a round explores with, and record it; policies published later do not change it.

    A round that is explored again keeps its snapshot and therefore gets the same rows. Another policy is chosen only if
    the recorded one is gone and the round is not trained yet. ``held`` is used instead of the newest policy.
    """
    settled = read(store, round_number).snapshot(name)
    if settled is not None and (is_published(store, settled) or published(store, round_number) is not None):
        return settled
    policy = held or explorer_of(store, round_number, offset_rounds, name)
    write_snapshot(store, round_number, policy)
    return policy


def is_published(store: ExperienceStore, policy: Policy) -> bool:
    """Whether a policy that a round took is still the policy published by its own round."""
    origin = published(store, policy.round, policy.name)
    return origin is not None and origin.weights_digest == policy.weights_digest


def deploy(engine: PolicyEngine, policy: Policy, least_serving: int | None = None) -> float | None:
    """Make the engine serve exactly ``policy``; after a weight change, compare it with the trainer's log-probs.

    Returns the canary's mean |delta log-prob| in nats, or None if nothing changed or no canary is known. Raises
    WeightMismatchError if the engine's log-probs differ from the trainer's for these weights, and DamagedError if the
    files it read are not the published ones. The engine then keeps serving its previous weights.

    With ``least_serving`` the replicas of a pool are updated and compared one after another, while at least this number
    of replicas take requests.
    """
    before = engine.status()
    same = (before.policy_version, before.weights_digest) == (policy.policy_version, policy.weights_digest)
    if same and not before.paused:  # a paused engine was interrupted before the canary ended: repeat the canary
        return None
    folder = Path(policy.folder)
    fetch_missing(folder)
    engine.fetch_weights(folder)  # before the engine is paused
    if least_serving is not None and isinstance(engine, EnginePool):
        found = engine.roll(lambda client: deploy(client, policy), least_serving)
        return max((each for each in found if each is not None), default=None)
    version, digest = policy.policy_version, policy.weights_digest
    difference = update_checked(engine, folder, version, policy.canary, digest)
    if before.paused:
        engine.resume()
    return difference


def explored_with(project: Project, round_number: int) -> dict[str, Policy]:
    """The policies that a round explores with, by name."""
    return {name: snapshot_of(project.store, round_number, name) for name in project.policies}


def ended_with(project: Project, round_number: int) -> dict[str, Policy]:
    """The policies that a round has published, by name."""
    return {name: required(project.store, round_number, name) for name in project.policies}
