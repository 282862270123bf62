"""The block mask of a trie against the plain definition of who sees whom."""

import numpy as np
import pytest
import torch

import rft_platform.training.packed.attention as tree_mask_module
from rft_platform.training.data.samples import Sample, demonstration_sample
from rft_platform.training.packed.attention import (
    _tiles,
    packed_attention,
    plan_attention,
    row_ranges,
    tree_attention,
    tree_mask,
)
from rft_platform.training.packed.packing import TILE, Pack, StaticLengths, pack


def dense(packed: Pack) -> np.ndarray:
    nodes = np.arange(len(packed.input_ids))
    return (nodes <= nodes[:, None]) & (nodes[:, None] < packed.subtree_end)


def conversations(seed: int, runs: int, turns: int, prompt: int, longest: int) -> list[Sample]:
    """Runs over one prompt, each turn a row whose prompt is the whole run so far."""
    rng = np.random.default_rng(seed)
    rows, start = [], rng.integers(5, 500, prompt)
    for run in range(runs):
        context = start
        for turn in range(turns):
            whole = np.concatenate([context, rng.integers(5, 500, rng.integers(1, longest))])
            rows.append(demonstration_sample(f"{run}-{turn}", whole, np.arange(len(whole)) >= len(context)))
            context = whole
    return rows


SHAPES = [(8, 1, 300, 200), (4, 4, 100, 90), (40, 1, 3, 40), (1, 1, 5, 6), (3, 2, 128, 129), (6, 1, 1, 400)]


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_hold_every_pair_that_sees_and_full_ones_no_other(shape: tuple[int, int, int, int]) -> None:
    rows = conversations(0, *shape) + conversations(1, *shape)
    packed = pack(rows, 1 << 20)[0]
    sees, (touched, full) = dense(packed), _tiles(packed)
    for i in range(len(touched)):
        for j in range(len(touched)):
            tile = sees[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            assert touched[i, j] == tile.any(), (i, j)
            assert full[i, j] == (j < i and tile.all()), (i, j)


def test_the_block_mask_equals_the_dense_mask() -> None:
    packed = pack(conversations(2, 8, 2, 300, 200), 1 << 20)[0]
    mask = tree_mask(packed, torch.device("cpu"))
    tiles = mask.to_dense()[0, 0].bool().numpy()
    np.testing.assert_array_equal(tiles, _tiles(packed)[0])
    index = torch.arange(len(packed.input_ids))
    zero = torch.tensor(0)
    assert mask.mask_mod is not None
    pairs = mask.mask_mod(zero, zero, index[:, None], index[None, :])
    np.testing.assert_array_equal(pairs.numpy(), dense(packed))


@pytest.mark.parametrize("tokens", [2, 40, 500, 5000])
def test_padding_after_rows_that_share_nothing_is_cut_into_few_rows(tokens: int) -> None:
    """The idle pack of a rank has one node. The kernel takes as long for a row of one token as for a whole tile."""
    row = demonstration_sample("0", np.arange(tokens) % 500, np.arange(tokens) > 0)
    packed = pack([row], 32768, static=StaticLengths())[0]
    ranges = row_ranges(packed, torch.device("cpu"))
    lengths = np.diff(ranges.offsets.numpy())
    assert lengths[0] == tokens - 1 and lengths.sum() == packed.length
    assert ranges.longest == max(TILE, tokens - 1) >= lengths.max()
    assert len(lengths) <= 1 + -(-packed.length // TILE)


def test_a_shared_prompt_has_full_tiles_and_runs_do_not_see_each_other() -> None:
    touched, full = _tiles(pack(conversations(3, 8, 1, 1024, 1000), 1 << 20)[0])
    assert full.sum() > 0.5 * touched.sum()
    touched, _ = _tiles(pack(conversations(3, 40, 1, 128, 500), 1 << 20)[0])
    assert touched.sum() < 0.2 * np.tri(len(touched)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [8, 32])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # which this is about
def test_attention_under_the_block_mask_equals_padded_blocks(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel needs a GPU; the same function run unfused tells of the mask, the groups and the padding."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(tree_mask_module, "_compiled", lambda: flex_attention)
    packed = pack(conversations(2, 6, 2, 100, 60), 1 << 20)[0]
    cpu, nodes = torch.device("cpu"), len(packed.input_ids)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, nodes, head_dim, generator=draw) for heads in (4, 2, 2))
    plan = plan_attention(packed, cpu, torch.float32)
    padded, _ = packed_attention(torch.nn.Identity(), query, key, value, None, attention_plan=plan)
    masked = tree_attention(query, key, value, tree_mask(packed, cpu), head_dim**-0.5)
    torch.testing.assert_close(masked, padded, atol=1e-5, rtol=1e-5)
