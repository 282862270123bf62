"""Which weights a round uses, and what the engine does with those that disagree with the trainer."""

import pytest

from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import StorageError, WeightMismatchError
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.canary import Canary
from rft_platform.rounds.project.policy import deploy, explorer_of, take_snapshot
from rft_platform.rounds.project.record import Policy, parent_of, publish, published


@pytest.fixture
def store(tmp_path) -> ExperienceStore:
    return ExperienceStore(tmp_path / "rounds")


def policy(number: int) -> Policy:
    return Policy(folder=f"/weights/{number}", policy_version=10 * number, weights_digest=f"d{number}", round=number)


def test_a_published_policy_is_read_back_as_it_was(store):
    written = Policy("/weights", 3, "digest", 1, Canary([[1, 2]], [[0.0, -1.5]]), "7")
    publish(store, written)
    assert published(store, 1) == written
    assert published(store, 2) is None


def test_the_explorer_takes_the_newest_policy_that_the_offset_permits(store):
    for number in (0, 1):
        publish(store, policy(number))
    assert explorer_of(store, 2, 0) == policy(1)
    assert explorer_of(store, 3, 1) == policy(1)
    with pytest.raises(StorageError, match="r0003 needs a policy of r0002 or later"):
        explorer_of(store, 3, 0)


def test_a_round_that_is_explored_again_keeps_its_policy_while_that_is_there(store):
    publish(store, policy(0))
    assert take_snapshot(store, 2, 1) == policy(0)
    publish(store, policy(1))
    assert take_snapshot(store, 2, 1) == policy(0), "settled"
    publish(store, Policy("/weights/0b", 0, "d0b", 0))
    assert take_snapshot(store, 2, 1) == policy(1), "the one it had is gone: the newest"
    publish(store, policy(2))
    publish(store, Policy("/weights/1b", 11, "d1b", 1))
    assert take_snapshot(store, 2, 1) == policy(1), "trained: its rows stay those of this policy"


def test_training_starts_from_the_round_before_and_nothing_else(store):
    publish(store, policy(0))
    assert parent_of(store, 1) == policy(0)
    with pytest.raises(StorageError, match="warm_start_job"):
        parent_of(ExperienceStore(store.root / "empty"), 1)


def test_weights_that_answer_otherwise_than_the_trainer_are_refused_and_the_old_ones_stay(
    policy_engine, tiny_model, tmp_path
):
    from rft_platform.recipes.tiny_model import build_model

    other = build_model(tmp_path / "other", seed=5)
    before = policy_engine.status()
    sequences = [[5, 9, 12, 40]]
    wrong = Canary(
        sequences, policy_engine.score(sequences)
    )  # log-probs of the weights served now, not of the new ones
    refused = Policy(str(other), 99, digest_weights(other), 1, wrong)
    with pytest.raises(WeightMismatchError, match="policy version 99"):
        deploy(policy_engine, refused)
    after = policy_engine.status()
    assert (after.policy_version, after.weights_digest) == (before.policy_version, before.weights_digest)
