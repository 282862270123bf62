"""Demonstrations and pairs longer than the limit: left out, counted, told; and a training without any is the same."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest import LogCaptureFixture

from rft_platform.common.errors import TrainingCancelled, UserError
from rft_platform.training.data.offline_data import read_demonstrations
from rft_platform.training.data.rollout_rows import TrainingRows
from rft_platform.training.data.samples import demonstration_sample
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.protocol import StepEvent, TrainRequest

PAIRS = [("1+1=?", "2"), ("what is it?", "the answer is " + "longer " * 30), ("2+2=?", "4")]


def train(session: TrainingSession, request: TrainRequest) -> Any:
    return session.train(request, lambda event: None, lambda: False)


def test_long_rows_are_left_out_and_counted(
    session: TrainingSession, sft_request: Any, tiny_model: Path, caplog: LogCaptureFixture
) -> None:
    request = sft_request(PAIRS, max_tokens_per_row=40)
    lengths = [len(sample.token_ids) for sample in read_demonstrations(request.demonstrations, tiny_model).samples]
    assert [length > 40 for length in lengths] == [False, True, False]
    with caplog.at_level(logging.WARNING):
        result = train(session, request)
    assert (result.metrics["rows_too_long"], result.metrics["rows"]) == (1.0, 2.0)
    assert "1 of 3 rows longer than max_model_len 40 left out" in caplog.text


@pytest.mark.slow
def test_a_limit_that_no_row_reaches_changes_nothing(session: TrainingSession, sft_request: Any) -> None:
    request = sft_request(PAIRS, max_tokens_per_row=None)
    first = train(session, request)
    again = train(session, replace(request, max_tokens_per_row=10_000))
    assert again.reused and again.weights_digest == first.weights_digest
    assert first.metrics["rows_too_long"] == 0
    assert not train(session, replace(request, max_tokens_per_row=40)).reused


def test_only_long_rows_are_an_error(session: TrainingSession, sft_request: Any) -> None:
    with pytest.raises(UserError, match=r"all of its 3 rows are longer than model\.max_model_len 3"):
        train(session, sft_request(PAIRS, max_tokens_per_row=3))


def test_a_pair_with_one_long_row_is_left_out() -> None:
    import numpy as np

    lengths = (5, 5, 5, 9, 5, 5)
    samples = [demonstration_sample(str(i), list(range(n)), np.arange(n) > 2) for i, n in enumerate(lengths)]
    kept = TrainingRows(samples, np.arange(6) // 2, "digest").within(8, "pairs")
    assert [sample.row_id for sample in kept.samples] == ["0", "1", "4", "5"]
    assert kept.group.tolist() == [sample.group for sample in kept.samples] == [0, 0, 1, 1]
    assert (kept.too_long, kept.digest != "digest") == (1, True)


@pytest.mark.slow
def test_steps_of_an_interrupted_training_are_reported_again(session: TrainingSession, sft_request: Any) -> None:
    request = sft_request(PAIRS, max_steps=4, save_interval=1)
    seen: list[StepEvent] = []
    with pytest.raises(TrainingCancelled):
        session.train(request, seen.append, lambda: len(seen) == 3)
    assert not any(event.reported_before for event in seen)
    seen.clear()
    session.train(request, seen.append, lambda: False)
    assert [event.step for event in seen] == [1, 2, 3, 4]
    again = [event.reported_before for event in seen]
    assert again[0] and not again[-1]
    seen.clear()
    assert session.train(request, seen.append, lambda: False).reused and not any(e.reported_before for e in seen)
