"""Several passes over the rows of a round: every pass has the ratio's denominator of the round's start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.training.data.rollout_rows import read_rollouts
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.protocol import StepEvent, TrainRequest


def logprobs(folder: str | Path, samples: list[Sample]) -> np.ndarray:
    """The log-probs of all trained tokens, by one plain forward pass per row in float64."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, local_files_only=True), []
    for sample in samples:
        tokens = torch.from_numpy(sample.token_ids).long()
        where = np.flatnonzero(sample.loss_mask)
        with torch.no_grad():
            table = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        found.append(table[where - 1, tokens[where]].numpy())
    return np.concatenate(found)


def clipped_loss(logp: np.ndarray, old: np.ndarray, rollout: np.ndarray, advantage: np.ndarray) -> float:
    """The mean over tokens of PPO's loss with clip 0.2 and 0.28, weighted by ``min(pi_old / pi_rollout, 2)``."""
    ratio = np.exp(logp - old)
    worst = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.28))
    return float((worst * np.minimum(np.exp(old - rollout), 2)).mean())


@pytest.mark.slow
def test_the_ratio_of_every_pass_is_to_the_policy_of_the_start(
    session: TrainingSession, round_request: Callable[..., TrainRequest], tiny_model: Path, tmp_path: Path
) -> None:
    spec = AlgorithmSpec(correction="decoupled", policy_loss_args={"dual_clip": None})
    settings: dict[str, Any] = {
        "algorithm": spec, "epochs": 3, "train_batch_size": 48, "optimizer": OptimizerSpec(lr=3e-3)
    }  # fmt: skip
    request, events = round_request(**settings), list[StepEvent]()
    assert session.train(request, events.append, lambda: False).steps == 3
    folders: list[str | Path] = [tiny_model]
    for steps in (1, 2):  # the same training, ended earlier
        ended = round_request(**settings, max_steps=steps, output=str(tmp_path / f"after-{steps}"))
        folders.append(session.train(ended, lambda event: None, lambda: False).checkpoint)
    samples = read_rollouts(request.rollouts, request.judged, policy_gradient=True).samples
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    advantage = np.repeat([float(np.max(sample.advantage)) for sample in samples], counts)
    rollout = np.concatenate([sample.rollout_logprobs[sample.loss_mask] for sample in samples])  # type: ignore[index]
    start = logprobs(tiny_model, samples)
    for event, folder in zip(events, folders, strict=True):
        now = logprobs(folder, samples)
        assert event.metrics["loss"] == pytest.approx(clipped_loss(now, start, rollout, advantage), abs=2e-5)
    renewed = clipped_loss(now, now, rollout, advantage)  # what a ratio to the pass's own start would give
    assert abs(renewed - events[-1].metrics["loss"]) > 1e-2
    assert events[-1].metrics["clip_fraction"] > 0 == events[0].metrics["clip_fraction"]
