"""Rows that share nothing need no mask on the CPU, and give what each gives alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rft_platform.training.data.samples import Sample
from rft_platform.training.packed.attention import plan_attention
from rft_platform.training.packed.lm_head import PackTensors
from rft_platform.training.packed.packed_policy import PackedPolicy
from rft_platform.training.packed.packing import pack

LENGTHS = (40, 33, 47, 40)


@pytest.fixture
def rows() -> list[Sample]:
    """Rows of 33 to 47 tokens that share the first 20 and no more."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 23, 20)
    ids = [np.concatenate([prompt, [index], rng.integers(0, 23, n - 21)]) for index, n in enumerate(LENGTHS)]
    return [Sample(str(i), row.astype(np.int32), np.arange(len(row)) >= 20) for i, row in enumerate(ids)]


def test_whole_rows_are_causal_and_trees_are_masked(rows: list[Sample]) -> None:
    cpu, dtype = torch.device("cpu"), torch.float32
    apart, tree = (pack(rows, 1000, share_prefixes=share)[0] for share in (False, True))
    assert len(apart.input_ids) == sum(LENGTHS) - len(LENGTHS)
    assert len(tree.input_ids) == sum(LENGTHS) - len(LENGTHS) - 20 * 3
    assert [blocks.mask for blocks in plan_attention(apart, cpu, dtype).blocks] == [None]
    assert any(blocks.mask is not None for blocks in plan_attention(tree, cpu, dtype).blocks)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_causal_blocks_give_what_rows_give_alone(
    rows: list[Sample], make_model: Callable[..., Any], dtype: torch.dtype, tolerance: float
) -> None:
    model = make_model()
    with torch.no_grad():
        alone = [
            torch.log_softmax(model(torch.from_numpy(row.token_ids).long()[None]).logits[0, :-1], -1)[
                torch.arange(len(row.token_ids) - 1), torch.from_numpy(row.token_ids[1:]).long()
            ][19:].numpy()
            for row in rows
        ]
        policy = PackedPolicy(model.to(dtype))
        packed = pack(rows, 1000, share_prefixes=False)[0]
        got = policy(PackTensors.of(packed, torch.device("cpu"), dtype)).float().numpy()
    values = np.zeros(sum(LENGTHS))
    values[packed.token_source] = got
    for row, want, found in zip(rows, alone, np.split(values, np.cumsum(LENGTHS)[:-1]), strict=True):
        np.testing.assert_allclose(found[row.loss_mask], want, atol=tolerance)
