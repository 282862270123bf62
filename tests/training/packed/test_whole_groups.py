"""Rows of a group stay in one pack where the loss compares them, and DPO is the same for any packs and ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.packed.packed_policy import PackedPolicy
from rft_platform.training.packed.packing import pack

DPO = AlgorithmSpec(policy_loss="dpo", loss_agg_mode="seq-mean-token-sum")


def random_pairs(
    seed: int, pairs: int, prompts: int, make_row: Callable[..., Sample], alphabet: int = 20
) -> list[Sample]:
    """Pairs of which many have the same prompt, so that in the order of their tokens they interleave."""
    rng = np.random.default_rng(seed)
    asked = [rng.integers(0, alphabet, rng.integers(2, 9)).tolist() for _ in range(prompts)]
    samples = []
    for pair in range(pairs):
        prompt = asked[rng.integers(prompts)]
        for sign in (1.0, -1.0):
            answer = rng.integers(0, alphabet, rng.integers(1, 7)).tolist()
            samples.append(make_row(prompt + answer, len(prompt), advantage=sign))
            samples[-1].group = pair
    return samples


@pytest.mark.parametrize("alphabet", [2, 20])  # few tokens: whole rows are prefixes of others, and equal
@pytest.mark.parametrize("max_tokens", [1, 13, 30, 100, 10_000])
def test_groups_are_never_split_and_packs_keep_to_the_budget(
    make_row: Callable[..., Sample], max_tokens: int, alphabet: int
) -> None:
    for seed in range(8):
        samples = random_pairs(seed, 25, 6, make_row, alphabet)
        packs = pack(samples, max_tokens, whole_groups=True)
        assert sorted(np.concatenate([p.rows for p in packs]).tolist()) == list(range(50))
        groups = [{samples[row].group for row in p.rows} for p in packs]
        assert sum(map(len, groups)) == 25
        for packed, members in zip(packs, groups, strict=True):
            alone = max(len(pack([s for s in samples if s.group == g], 10_000)[0].input_ids) for g in members)
            assert len(packed.input_ids) <= max(max_tokens, alone)
            again = pack([samples[row] for row in packed.rows], 10_000)[0]
            assert again.input_ids.tolist() == packed.input_ids.tolist()  # one trie, with all that can be shared


def test_pairs_of_one_prompt_share_it_and_packs_are_filled(make_row: Callable[..., Sample]) -> None:
    samples = []
    for pair in range(40):
        for sign in (1.0, -1.0):
            samples.append(make_row([9] * 50 + [pair, int(sign > 0), 3], 50, advantage=sign))
            samples[-1].group = pair
    packs = pack(samples, 100, whole_groups=True)
    # 50 of the prompt, and of a pair 3: its first token and one of each answer (the last predicts nothing).
    assert [len(p.input_ids) for p in packs] == [98, 98, 74]
    assert sum(len(p.rows) for p in packs) == 80


def test_order_of_the_samples_does_not_matter(make_row: Callable[..., Sample]) -> None:
    samples = random_pairs(3, 25, 6, make_row)
    shuffled = [samples[i] for i in np.random.default_rng(0).permutation(50)]
    one, other = (pack(s, 40, whole_groups=True) for s in (samples, shuffled))
    assert [p.input_ids.tolist() for p in one] == [p.input_ids.tolist() for p in other]


def plain_dpo(model: Any, samples: list[Sample]) -> torch.Tensor:
    """The textbook formula with beta 0.1, one forward a row."""
    d = []
    for sample in samples:
        ids, where = torch.from_numpy(sample.token_ids).long(), torch.from_numpy(np.flatnonzero(sample.loss_mask))
        log_softmax = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        assert sample.reference_logprobs is not None
        reference = torch.from_numpy(sample.reference_logprobs)[where]
        d.append((log_softmax[where - 1, ids[where]] - reference).sum())
    chosen, rejected = torch.stack(d).unflatten(0, (-1, 2)).unbind(1)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def test_a_pair_that_a_step_takes_twice_is_two_pairs(
    make_model: Callable[..., Any], make_row: Callable[..., Sample]
) -> None:
    samples, once, twice = random_pairs(5, 8, 3, make_row), make_model(), make_model()
    want = accumulate_gradients(PackedPolicy(once), samples, DPO, max_tokens_per_pack=1000)
    got = accumulate_gradients(PackedPolicy(twice), [*samples, *samples], DPO, max_tokens_per_pack=1000)
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-6)
    for one, other in zip(once.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("max_tokens", [10_000, 25, 1])
@pytest.mark.parametrize("chunk", [1 << 27, 3 * 23])  # one chunk of the head, or several: then rows span chunks
def test_dpo_is_the_textbook_formula_for_any_packs_and_chunks(
    make_model: Callable[..., Any],
    make_row: Callable[..., Sample],
    monkeypatch: pytest.MonkeyPatch,
    max_tokens: int,
    chunk: int,
) -> None:
    monkeypatch.setattr("rft_platform.training.packed.lm_head.CHUNK_ELEMENTS", chunk)
    samples, plain, model = random_pairs(5, 8, 3, make_row), make_model(), make_model()
    want = plain_dpo(plain, samples)
    want.backward()
    metrics = accumulate_gradients(PackedPolicy(model), samples[::-1], DPO, max_tokens_per_pack=max_tokens)
    assert metrics["loss"] == pytest.approx(want.item(), abs=1e-5)
    for (name, got), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, parameter.grad, atol=1e-5, rtol=1e-4, msg=name)
