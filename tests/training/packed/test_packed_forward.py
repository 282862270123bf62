"""Packed rows against separate rows: the same log-probs, the same gradients, no attention across rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.packed import attention, lm_head
from rft_platform.training.packed.lm_head import PackTensors
from rft_platform.training.packed.packed_policy import PackedPolicy, score
from rft_platform.training.packed.packing import pack
from tests.support.builders import gradients

CPU = torch.device("cpu")


def dense(model: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a row's trainable tokens by a plain forward of the row alone."""
    ids = torch.from_numpy(sample.token_ids).long()
    log_softmax = (model(input_ids=ids[None]).logits[0].float() / sample.temperature).log_softmax(-1)
    where = torch.from_numpy(np.flatnonzero(sample.loss_mask))
    before = log_softmax[where - 1]
    return before.gather(1, ids[where, None])[:, 0], -(before.exp() * before).sum(-1)


def weights_of(sample: Sample) -> Tensor:
    """Some fixed, different factor for every trainable token."""
    return torch.from_numpy(np.cos(1.0 + np.flatnonzero(sample.loss_mask) + sample.advantage)).float()


def packed_loss(policy: PackedPolicy, samples: list[Sample], max_tokens: int, whole_rows: bool = False) -> Tensor:
    """Backward of sum(w * (logp + 0.3 * entropy)) over packs; returns the total."""
    flat = torch.zeros(sum(len(s.token_ids) for s in samples))
    flat[torch.from_numpy(np.concatenate([s.loss_mask for s in samples]))] = torch.cat([weights_of(s) for s in samples])
    total = torch.zeros(())
    for packed in pack(samples, max_tokens):
        weight = flat[torch.from_numpy(packed.token_source)]

        def loss_of(logp: Tensor, entropy: Tensor, tokens: slice, weight: Tensor = weight) -> Tensor:
            return (weight[tokens] * (logp + 0.3 * entropy)).sum()

        loss = policy(PackTensors.of(packed, CPU, torch.float32), loss_of, whole_rows)
        loss.backward()
        total += loss.detach()
    return total


def dense_loss(model: Any, samples: list[Sample]) -> Tensor:
    total = torch.zeros(())
    for sample in samples:
        logp, entropy = dense(model, sample)
        loss = (weights_of(sample) * (logp + 0.3 * entropy)).sum()
        loss.backward()
        total += loss.detach()
    return total


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        scale = max(1.0, gradient.abs().max().item())
        assert (got[name] - gradient).abs().max().item() <= 1e-5 * scale, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_tokens", [10_000, 20, 1])
def test_scores_equal_those_of_single_rows(
    rows: list[Sample], make_model: Callable[..., Any], tied: bool, max_tokens: int
) -> None:
    plain, policy = make_model(tied=tied), PackedPolicy(make_model(tied=tied))
    got = score(policy, rows, max_tokens_per_pack=max_tokens)
    for values, sample in zip(got, rows, strict=True):
        np.testing.assert_allclose(values, dense(plain, sample)[0].detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("whole_rows", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_equal_those_of_single_rows(
    rows: list[Sample],
    make_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
    chunk: int,
    whole_rows: bool,
) -> None:
    plain, model = make_model(tied=tied), make_model(tied=tied)
    monkeypatch.setattr(lm_head, "CHUNK_ELEMENTS", chunk * model.config.vocab_size)
    want = dense_loss(plain, rows)
    got = packed_loss(PackedPolicy(model), rows, 20, whole_rows)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert_same_gradients(gradients(model), gradients(plain))


@st.composite
def tries(draw: st.DrawFn) -> list[Sample]:
    rows = []
    for index in range(draw(st.integers(1, 8))):
        ids = draw(st.lists(st.integers(0, 2), min_size=2, max_size=9))
        mask = np.array([False] + [draw(st.booleans()) for _ in ids[1:]])
        mask[-1] = True
        rows.append(Sample(str(index), np.array(ids, np.int32), mask, advantage=float(index)))
    return rows


@pytest.fixture(scope="module")
def twins(make_model: Callable[..., Any]) -> tuple[Any, PackedPolicy]:
    """The same weights twice: transformers as it is, and packed."""
    return make_model(), PackedPolicy(make_model())


@pytest.mark.slow
@pytest.mark.parametrize(("gather", "bucket"), [(16, 4096), (0, 0), (10**6, 0), (0, 10**6)])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples=tries())
def test_random_tries_equal_single_rows_however_attention_is_cut(
    samples: list[Sample], twins: tuple[Any, PackedPolicy], monkeypatch: pytest.MonkeyPatch, gather: int, bucket: int
) -> None:
    monkeypatch.setattr(attention, "GATHER_COST", gather)
    monkeypatch.setattr(attention, "BUCKET_COST", bucket)
    plain, policy = twins
    want, got = dense_loss(plain, samples), packed_loss(policy, samples, 10_000)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
    assert_same_gradients(gradients(policy.model), gradients(plain))


def test_changing_one_row_of_a_pack_changes_no_other(rows: list[Sample], policy: PackedPolicy) -> None:
    before = score(policy, rows, max_tokens_per_pack=10_000)
    rows[-1].token_ids[:] = (rows[-1].token_ids + 1) % 23
    after = score(policy, rows, max_tokens_per_pack=10_000)
    for one, other in zip(before[:-1], after[:-1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert np.abs(before[-1] - after[-1]).max() > 1e-3


def test_a_shared_prompt_is_computed_once(rows: list[Sample]) -> None:
    packed = pack(rows[:5], 10_000)[0]
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert len(packed.head_node) == 3
    assert len(packed.pair_head) == 5  # 5 and 9 after the prompt, 6 and 0 after 5, 0 after 6


def test_plain_sdpa_over_a_pack_is_refused(rows: list[Sample], policy: PackedPolicy) -> None:
    policy.model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="would mix the rows"):
        score(policy, rows, max_tokens_per_pack=10_000)


def test_packed_attention_without_a_plan_is_refused(policy: PackedPolicy) -> None:
    with pytest.raises(RuntimeError, match="called without a plan"):
        policy.model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_a_sliding_window_is_refused_only_where_it_would_bite(
    rows: list[Sample], make_model: Callable[..., Any]
) -> None:
    model = make_model(use_sliding_window=True, sliding_window=9, max_window_layers=0)
    policy = PackedPolicy(model)
    score(policy, rows[:5], max_tokens_per_pack=100)
    with pytest.raises(RuntimeError, match="sliding_window 9 on rows of up to"):
        score(policy, rows, max_tokens_per_pack=100)


def test_gradient_checkpointing_changes_nothing(rows: list[Sample], make_model: Callable[..., Any]) -> None:
    plain, model = make_model(), make_model()
    packed_loss(PackedPolicy(plain), rows, 50)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    packed_loss(PackedPolicy(model), rows, 50)
    assert_same_gradients(gradients(model), gradients(plain))


def test_lora_trains_its_adapter_alone(rows: list[Sample], make_model: Callable[..., Any]) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    policy = PackedPolicy(model)
    packed_loss(policy, rows, 50)
    got = gradients(model)
    assert got
    assert all("lora_" in name for name in got)
    model.get_base_model().set_attn_implementation("eager")
    dense_loss(model, rows)
    assert_same_gradients(got, gradients(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler, of itself
@pytest.mark.parametrize("head_dim", [8, 32])
def test_the_block_mask_on_cuda_equals_padded_blocks(
    rows: list[Sample], make_model: Callable[..., Any], head_dim: int
) -> None:
    """On CUDA bfloat16 takes the block mask; float32 on the CPU is the reference."""
    spread = [rows, [rows[0], rows[7], rows[9]]]  # a trie, and rows that share nothing
    for samples in spread:
        plain = make_model(head_dim=head_dim)
        model = make_model(dtype=torch.bfloat16, head_dim=head_dim).to("cuda")
        exact = np.concatenate(score(PackedPolicy(plain), samples, max_tokens_per_pack=100))
        policy = PackedPolicy(model)
        got = np.concatenate(score(policy, samples, max_tokens_per_pack=100))
        assert np.abs(exact - got).mean() < 0.05
        accumulate_gradients(policy, samples, AlgorithmSpec(), max_tokens_per_pack=100)
        accumulate_gradients(PackedPolicy(plain), samples, AlgorithmSpec(), max_tokens_per_pack=100)
        on_gpu, on_cpu = gradients(model), gradients(plain)
        for name, gradient in on_cpu.items():
            cosine = torch.cosine_similarity(on_gpu[name].float().cpu().flatten(), gradient.flatten(), 0)
            assert cosine > 0.98, name


def test_bfloat16_is_close_to_float32(rows: list[Sample], make_model: Callable[..., Any]) -> None:
    exact = score(PackedPolicy(make_model()), rows, max_tokens_per_pack=100)
    rounded = score(PackedPolicy(make_model(dtype=torch.bfloat16)), rows, max_tokens_per_pack=100)
    assert np.abs(np.concatenate(exact) - np.concatenate(rounded)).mean() < 0.05
