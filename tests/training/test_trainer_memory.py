"""At most one state is in memory whenever one is read: models are as large as the machine can hold."""

import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rft_platform.algorithms.spec import AlgorithmSpec, CriticSpec, OptimizerSpec
from rft_platform.common.errors import NonFiniteError, StorageError, TrainingCancelled, UserError
from rft_platform.training.loop import session as session_module
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.protocol import StepEvent


class Memory:
    """The states that were read, and how many of those before were alive each time."""

    def __init__(self) -> None:
        self.states: list[weakref.ref] = []
        self.alive: list[int] = []

    def count(self) -> None:
        """Without collecting: a session must have freed what it held before it reads."""
        self.alive.append(sum(state() is not None for state in self.states))


@pytest.fixture
def memory(monkeypatch) -> Iterator[Memory]:
    """Watches ``load_state``."""
    seen, original = Memory(), session_module.load_state

    def load_state(*arguments, **settings):
        seen.count()
        state = original(*arguments, **settings)
        seen.states.append(weakref.ref(state.policy))
        return state

    monkeypatch.setattr(session_module, "load_state", load_state)
    return seen


def train(session: TrainingSession, request, stop_after: int | None = None):
    done: list[StepEvent] = []
    return session.train(request, done.append, lambda: len(done) == stop_after)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["whole", "sharded"])
def test_one_state_is_alive_after_a_cancel_and_a_continuation(ranks, round_request, memory, dtype) -> None:
    session = TrainingSession(ranks, dtype)
    request = round_request(groups=3, train_batch_size=4, save_interval=1)
    with pytest.raises(TrainingCancelled):
        train(session, request, stop_after=2)
    assert memory.alive == [0, 0]  # the parent; the parent again
    train(session, request)
    assert memory.alive == [0, 0, 0, 0]  # the parent, for what it says of the rows; the step on the way
    train(session, replace(request, output=request.output + "-next", seed=8))
    assert memory.alive == [0, 0, 0, 0, 0] and sum(ref() is not None for ref in memory.states) == 1


@pytest.mark.slow
def test_after_a_refused_step_one_state_is_alive(session, round_request, memory) -> None:
    critic = CriticSpec(optimizer=OptimizerSpec(lr=1e-3))
    request = round_request(
        groups=3,
        train_batch_size=4,
        optimizer=OptimizerSpec(lr=1e30),
        algorithm=AlgorithmSpec(token_advantage="gae", critic=critic),
    )
    with pytest.raises(NonFiniteError) as refused:
        train(session, request)
    assert memory.alive == [0, 0] and refused.value.__traceback__ is not None


@pytest.mark.slow
def test_after_an_error_deep_in_a_step_one_state_is_alive(session, round_request, memory, monkeypatch) -> None:
    from rft_platform.training.loop import optimizer_step

    def fail(policy, *arguments, **settings):
        try:
            raise StorageError("the cause, whose frames hold the policy too")
        except StorageError as error:
            raise UserError("no") from error

    monkeypatch.setattr(optimizer_step, "accumulate_gradients", fail)
    with pytest.raises(UserError):
        train(session, round_request(groups=2))
    assert memory.alive == [0, 0]


@pytest.mark.slow
def test_a_save_that_fails_leaves_one_state_alive(session, round_request, memory, monkeypatch) -> None:
    from rft_platform.training.checkpoint import content

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(content, "write_shards", full)
    with pytest.raises(StorageError):
        train(session, round_request(groups=3, train_batch_size=4, save_interval=1))
    assert memory.alive == [0, 0]
