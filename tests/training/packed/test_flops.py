"""Counted operations against PyTorch's own counter, and what they decide: trees or separate rows, who gets what."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.loop.training_run import share_of_rank
from rft_platform.training.packed.flops import (
    TrainingCost,
    Work,
    _from_data_sheet,
    added_flops,
    peak_flops,
    sharing_pays,
)
from rft_platform.training.packed.packed_policy import PackedPolicy
from rft_platform.training.packed.packing import pack


def line(ids: list[int], start: int, name: str = "row") -> Sample:
    """A row whose tokens from ``start`` on are trained."""
    tokens = np.array(ids, np.int32)
    return Sample(name, tokens, np.arange(len(ids)) >= start, np.full(len(ids), -3.0, np.float32), 1.0)


@pytest.mark.parametrize("tied", [True, False])
def test_forward_and_backward_match_the_count_of_pytorch(make_model: Callable[..., Any], tied: bool) -> None:
    model = make_model(tied=tied)
    cost = TrainingCost.of(PackedPolicy(model))
    model.set_attn_implementation("eager")  # every query with every key, in matrix products that are counted
    n = 17
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(n)[None]).logits.sum().backward()
    assert cost.flops(Work(n, n * n, n)) == counter.get_total_flops()


def test_weights_that_are_not_trained_need_no_gradient(make_model: Callable[..., Any]) -> None:
    model = make_model(tied=False)
    trained = TrainingCost.of(PackedPolicy(model))
    model.requires_grad_(False)
    frozen = TrainingCost.of(PackedPolicy(model))
    assert (frozen.node, frozen.head) == (trained.node * 4 / 6, trained.head * 4 / 6)


def test_work_of_a_tree_and_of_its_rows(rows: list[Sample]) -> None:
    packs = pack(rows, 20)
    pairs = sum(
        int(p.subtree_end[j] > i) for p in packs for i in range(len(p.input_ids)) for j in range(i + 1)
    )  # node i sees node j
    tree = Work.of_packs(packs)
    assert tree == Work(sum(len(p.input_ids) for p in packs), pairs, sum(len(p.head_node) for p in packs))
    fed = [int(np.flatnonzero(row.loss_mask)[-1]) for row in rows]
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    assert Work.of_rows(packs) == Work(sum(fed), sum(n * (n + 1) / 2 for n in fed), trained)


def test_added_flops_equal_the_flops_of_the_tree(rows: list[Sample], policy: PackedPolicy) -> None:
    cost = replace(TrainingCost.of(policy), head=0.0)  # equal distributions are told apart only when packs are made
    added = added_flops(cost, rows)
    assert added.sum() == pytest.approx(cost.flops(Work.of_packs(pack(rows, 10_000))))
    assert added.min() == 0  # the same completion again


def test_a_prompt_is_shared_and_a_single_token_is_not(policy: PackedPolicy) -> None:
    rng = np.random.default_rng(0)

    def group(shared: int) -> list[Sample]:
        prompt = rng.integers(0, 23, shared).tolist()
        return [line([*prompt, own, *rng.integers(0, 23, 190).tolist()], 180) for own in range(4)]

    def computed(rows: list[Sample], share: bool | None) -> dict[str, float]:
        return accumulate_gradients(policy, rows, AlgorithmSpec(), max_tokens_per_pack=10_000, share_prefixes=share)

    little, much = group(1), group(100)
    chosen = computed(little, None)
    assert chosen["flops_share"] == 1
    assert chosen["tokens_computed"] == computed(little, False)["tokens_computed"]
    assert computed(little, True)["flops_share"] > 0.99
    chosen = computed(much, None)
    assert chosen["tokens_computed"] == computed(much, True)["tokens_computed"] == 4 * 190 + 100
    assert 0.6 < chosen["flops_share"] < 0.85
    cost = TrainingCost(node=100.0, pair=1.0, head=10.0)
    assert sharing_pays(cost, Work(98, 0, 0), Work(100, 0, 0))
    assert not sharing_pays(cost, Work(99.5, 0, 0), Work(100, 0, 0))
    assert sharing_pays(cost, Work(100, 0, 0), Work(100, 0, 0))


def test_ranks_are_balanced_by_work_and_not_by_tokens() -> None:
    """Long answers pay for attention; eight answers of one prompt share it."""
    cost = TrainingCost(node=1.0, pair=0.01, head=0.0)
    rng = np.random.default_rng(0)
    samples, group = [], []
    for number in range(12):
        prompt = rng.integers(0, 23, 400 if number % 2 else 20).tolist()
        for _ in range(8 if number % 2 else 3):
            samples.append(line([*prompt, *rng.integers(0, 23, 20 if number % 2 else 500).tolist()], len(prompt)))
            group.append(number)
    every, groups = np.arange(len(samples)), np.array(group)
    work = added_flops(cost, samples)

    def heaviest(weight: np.ndarray) -> float:
        """Work of the busiest rank over the mean."""
        shares = [share_of_rank(every, groups, weight, rank, 4) for rank in range(4)]
        assert sorted(np.concatenate(shares).tolist()) == every.tolist()
        return max(cost.flops(Work.of_packs(pack([samples[i] for i in s], 10**6))) for s in shares) * 4 / work.sum()

    by_tokens = heaviest(np.array([len(s.token_ids) for s in samples]))
    assert heaviest(work) < 1.15 < by_tokens


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_data_sheets_are_found_by_the_devices_own_name(name: str, tflops: float) -> None:
    found = _from_data_sheet(name, torch.bfloat16)
    assert found == tflops * 1e12
    assert (_from_data_sheet(name, torch.float32) or 0) < found


def test_other_devices_are_measured_once() -> None:
    assert _from_data_sheet("NVIDIA GeForce GTX 480", torch.bfloat16) is None
    cpu = torch.device("cpu")
    assert 1e8 < peak_flops(cpu, torch.float32) == peak_flops(cpu, torch.float32)
