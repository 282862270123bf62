"""What every optimiser step says of itself, and what a refused one blames."""

import math

import numpy as np
import pytest

from rft_platform.common.errors import NonFiniteError
from rft_platform.config.home import Home
from rft_platform.training.data.rollout_rows import TrainingRows
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop.step_metrics import STALENESS_BINS, row_metrics, summarise
from rft_platform.training.protocol import StepEvent
from rft_platform.training.service.trainer_client import find_or_start_trainer

ALWAYS = {
    "loss", "grad_norm", "lr", "entropy", "clip_fraction", "clip_low", "clip_high",
    "mismatch_k3", "mismatch_abs", "mismatch_outside", "ess", "ratio",
    "staleness_mean", "staleness_max", *(f"staleness_from_{low}" for low in STALENESS_BINS),
    "zero_variance_groups", "zero_advantage_share", "truncation_rate", "reward_mean", "advantage_mean",
    "mfu", "flops", "tokens_per_s", "computed_share", "flops_share", "rank_balance",
    "step_seconds", "forward_backward_seconds", "optimizer_seconds",
    "pack_seconds", "forward_seconds", "backward_seconds", "cpu_seconds", "peak_rss_mb",
}  # fmt: skip


def events_of(session, request) -> list[StepEvent]:
    events: list[StepEvent] = []
    session.train(request, events.append, lambda: False)
    return events


def test_every_step_reports_all_metrics(session, round_request) -> None:
    events = events_of(session, round_request())
    assert len(events) == 3
    for event in events:
        metrics = event.metrics
        assert metrics.keys() >= ALWAYS
        assert all(math.isfinite(value) for value in metrics.values())
        parts = metrics["pack_seconds"] + metrics["forward_seconds"] + metrics["backward_seconds"]
        assert 0.5 * metrics["forward_backward_seconds"] < parts <= metrics["forward_backward_seconds"]
        whole = metrics["forward_backward_seconds"] + metrics["optimizer_seconds"]
        assert metrics["step_seconds"] == pytest.approx(whole)
        assert metrics["tokens_per_s"] == pytest.approx(metrics["tokens_unpacked"] / metrics["step_seconds"])
        assert 0 < metrics["mfu"] < 1.5  # the peak is measured: noise may pass it, a wrong count would by far
        assert metrics["flops_share"] < 1 == metrics["rank_balance"]
        assert sum(metrics[f"staleness_from_{low}"] for low in STALENESS_BINS) == pytest.approx(1)
    total = summarise([event.metrics for event in events])
    assert total["flops"] == sum(event.metrics["flops"] for event in events)
    assert total["mfu"] == pytest.approx(np.mean([event.metrics["mfu"] for event in events]))


@pytest.mark.slow
def test_the_row_at_fault_is_named_and_nothing_is_lost(session, round_request) -> None:
    request, culprit = round_request(), []

    def spoil(rows, judged) -> None:
        culprit.append(judged[21].row_id)
        judged[21].advantage = -3e38  # finite, but not once it is multiplied by a large ratio
        rows[21].call.rollout_logprobs = [-24.0] * len(rows[21].rollout_logprobs)

    before = session.train(request, lambda event: None, lambda: False)
    scores = session.score([[5, 6, 7]])
    with pytest.raises(NonFiniteError, match="was refused") as caught:
        session.train(round_request(edit=spoil, parent=before.checkpoint), lambda event: None, lambda: False)
    message = str(caught.value)
    assert f"rows that are not finite even alone: {culprit[0]};" in message
    assert "gradient is not finite: model.embed_tokens.weight, " in message
    assert "whose weights are not: none." in message
    assert session.score([[5, 6, 7]]) == scores


@pytest.mark.slow
def test_the_error_names_the_parameter(session, round_request) -> None:
    request = round_request()
    session.train(request, lambda event: None, lambda: False)

    def spoil(event: StepEvent) -> None:
        session.state.policy.model.model.layers[1].mlp.up_proj.weight.data[0, 0] = math.nan

    with pytest.raises(NonFiniteError, match=r"weights are not: model\.layers\.1\.mlp\.up_proj\.weight\."):
        session.train(round_request(seed=2), spoil, lambda: False)


def test_metrics_of_the_rows_of_a_step() -> None:
    samples = [Sample(str(i), np.zeros(2, np.int32), np.array([False, True])) for i in range(8)]
    facts = {
        "policy_version": np.array([3, 3, 2, 2, 0, 0, 0, 0]),
        "truncated": np.array([0, 1, 0, 0, 0, 0, 0, 0], bool),
        "run": np.repeat(np.arange(4), 2),
        "step": np.array([1, 0, 0, 1, 0, 1, 0, 1]),
        "reward": np.array([1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0]),
    }
    rows = TrainingRows(samples, np.repeat([0, 1], 4), "digest", facts, zero_variance_groups=0.5)
    metrics = row_metrics(rows, np.arange(8), 4)
    assert metrics["zero_variance_groups"] == 0.5  # of the whole training, not of the step
    assert row_metrics(rows, np.arange(0), 4) == {"zero_variance_groups": 0.5}
    assert metrics["truncation_rate"] == 1 / 8
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (2.75, 4)
    assert [metrics[f"staleness_from_{low}"] for low in STALENESS_BINS] == [0, 0.5, 0.5, 0, 0, 0]


@pytest.mark.slow
def test_two_ranks_report_the_same_metrics_and_culprit(tmp_path, round_request) -> None:
    culprit = []

    def spoil(rows, judged) -> None:
        culprit.append(judged[30].row_id)
        judged[30].advantage = -3e38
        rows[30].call.rollout_logprobs = [-24.0] * len(rows[30].rollout_logprobs)

    cluster = Home(tmp_path).cluster
    trainer = find_or_start_trainer(cluster, nproc=2, dtype="float32", device="cpu", idle_timeout_s=120)
    events: list[StepEvent] = []
    try:
        trainer.train(round_request(), events.append)
        with pytest.raises(NonFiniteError, match="was refused") as caught:
            trainer.train(round_request(seed=1, edit=spoil), lambda event: None)
    finally:
        trainer.shutdown()
    assert f"not finite even alone: {culprit[0]}; parameters" in str(caught.value)
    assert "gradient is not finite: model.embed_tokens.weight, " in str(caught.value)
    for event in events:
        assert event.metrics.keys() >= ALWAYS
        assert 0.8 < event.metrics["rank_balance"] <= 1
        assert 0 < event.metrics["mfu"] < 1.5
