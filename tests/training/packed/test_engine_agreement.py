"""The trainer's log-probs are those of padded and of single sequences, and those of the engine that sampled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.training.data.samples import Sample, rollout_sample
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.packed.packed_policy import PackedPolicy, score


def test_packed_padded_and_single_sequences_agree(rows: list[Sample], model: Any) -> None:
    single = [_dense(model, [row])[0] for row in rows]
    padded = _dense(model, rows)
    policy = PackedPolicy(model)
    for budget in (10_000, 20):
        packed = score(policy, rows, max_tokens_per_pack=budget)
        for one, other, third in zip(packed, single, padded, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
            np.testing.assert_allclose(third, other, atol=1e-5)


def test_the_engine_that_sampled_agrees_with_the_trainer(policy_engine: PolicyEngine, tiny_model: Path) -> None:
    """fp32 on both sides: |delta log-prob| <= 1e-4 in the mean, so a first step's ratio is 1."""
    from transformers import AutoModelForCausalLM

    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 500, length).tolist() for length in (4, 9, 30)]
    samples = []
    for temperature in (1.0, 0.6):
        sampling = SamplingParams(24, n=4, temperature=temperature, seed=1)
        for index, generation in enumerate(policy_engine.generate(prompts, sampling)):
            for choice, done in enumerate(generation.completions):
                name, mask = f"{index}-{choice}-{temperature}", np.ones(len(done.token_ids), bool)
                row = (generation.prompt_ids, done.token_ids, done.logprobs, mask)
                samples.append(rollout_sample(name, *row, advantage=1.0, temperature=temperature))
    policy = PackedPolicy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
    metrics = accumulate_gradients(policy, samples, AlgorithmSpec(), max_tokens_per_pack=200)
    assert metrics["tokens"] > 200
    assert metrics["mismatch_abs"] <= 1e-4
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert abs(metrics["mismatch_k3"]) < 1e-8
    assert metrics["mismatch_outside"] == metrics["clip_fraction"] == 0


def _dense(model: Any, rows: list[Sample]) -> list[np.ndarray]:
    """Log-probs of trainable tokens by a plain forward of the rows, padded on the right to the longest."""
    ids = torch.zeros(len(rows), max(len(row.token_ids) for row in rows), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row.token_ids)] = torch.from_numpy(row.token_ids)
        mask[index, : len(row.token_ids)] = 1
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    found = []
    for index, row in enumerate(rows):
        where = torch.from_numpy(np.flatnonzero(row.loss_mask))
        log_softmax = (logits[index] / row.temperature).log_softmax(-1)[where - 1]
        found.append(log_softmax.gather(1, ids[index, where, None])[:, 0].numpy())
    return found
