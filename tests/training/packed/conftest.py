"""A small random Qwen3 model, and rows that share prefixes in every way that packing must handle."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_model import VOCABULARY, build_model

from rft_platform.training.data.samples import Sample
from rft_platform.training.packed.packed_policy import PackedPolicy


@pytest.fixture
def model() -> Any:
    return build_model()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    return build_model


@pytest.fixture
def policy(model: Any) -> PackedPolicy:
    return PackedPolicy(model)


def row(ids: list[int], start: int, *, advantage: float = 1.0, temperature: float = 1.0, name: str = "row") -> Sample:
    """Tokens from ``start`` on are trainable; rollout log-probs are made up but fixed."""
    tokens = np.array(ids, np.int32)
    mask = np.arange(len(ids)) >= start
    behaviour = np.where(mask, -1.0 - 0.1 * (tokens % 5), 0).astype(np.float32)
    reference = np.where(mask, -1.2 - 0.1 * (tokens % 3), 0).astype(np.float32)
    return Sample(name, tokens, mask, behaviour, advantage, temperature, reference_logprobs=reference)


@pytest.fixture
def make_row() -> Callable[..., Sample]:
    return row


@pytest.fixture
def rows() -> list[Sample]:
    """A group with equal, nested and diverging completions, a two-turn run, a stranger, temperatures and masks."""
    prompt = [1, 2, 3, 4]
    rng = np.random.default_rng(0)
    turn = row([*prompt, 5, 6, 7, 8, 9, 10], 8)
    turn.loss_mask[4:6] = True  # the first turn's answer is trained on as well
    return [
        row([*prompt, 5, 6, 0], 4),
        row([*prompt, 5, 6, 0], 4, advantage=-0.7),  # the same completion again
        row([*prompt, 5, 0], 4, advantage=0.3),
        row([*prompt, 5, 6], 4, advantage=-1.2),  # a prefix of another row
        row([*prompt, 9], 4, advantage=2.0),  # one token only
        row([*prompt, 5, 6, 0], 4, temperature=0.7),  # the same tokens, another distribution
        turn,
        row([7, 7, 7], 1, advantage=-2.0),
        row([1, 8, 8, 3], 2, advantage=0.0),
        row(rng.integers(0, VOCABULARY, 30).tolist(), 10, advantage=0.5),
    ]
