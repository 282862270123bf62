"""The uniforms: known hash values, independence of the batch, statistics."""

import torch

from rft_platform.inference.transformers_engine.sampling import fold, mix64, row_keys, uniforms

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The finaliser in plain Python, as published."""
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_hash_equals_the_published_one() -> None:
    # The first outputs of SplitMix64 seeded with 0: the finaliser of multiples of the golden ratio.
    golden = 0x9E3779B97F4A7C15
    assert splitmix64(golden) == 0xE220A8397B1DCDAF
    values = [0, 1, golden, MASK, 1 << 63, 0x123456789ABCDEF0]
    signed = torch.tensor([value - (1 << 64) if value >> 63 else value for value in values])
    assert [int(x) & MASK for x in mix64(signed)] == [splitmix64(value) for value in values]


def test_a_key_does_not_depend_on_its_neighbours() -> None:
    together = row_keys(7, [0, 0, 1, 1, 2], [0, 1, 0, 1, 0])
    apart = [row_keys(7, [p], [c]).item() for p, c in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))]
    assert together.tolist() == apart
    assert len(set(apart)) == 5
    assert row_keys(8, [0], [0]).item() not in apart


def test_any_integer_is_a_seed_and_none_draws_a_new_seed() -> None:
    keys = {row_keys(seed, [0], [0]).item() for seed in (0, -1, 1 << 62, 1 << 80, (1 << 80) + 1)}
    assert len(keys) == 4  # only the low 64 bits count: 1 << 80 is 0
    assert row_keys(None, [0], [0]).item() != row_keys(None, [0], [0]).item()


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    rows, positions = 2000, 50
    keys = row_keys(3, [i // 8 for i in range(rows)], [i % 8 for i in range(rows)])
    table = torch.stack([uniforms(keys, torch.full((rows,), p)) for p in range(positions)])
    assert table.min() >= 0 and table.max() < 1
    counts = torch.histc(table, 100, 0, 1)
    expected = rows * positions / 100
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 150  # 99 degrees of freedom: mean 99, 5 sigma at 169
    for left, right in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):  # next position, next choice
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1].item()
        assert abs(correlation) < 5 / (rows * positions) ** 0.5


def test_children_of_a_key_differ() -> None:
    key = torch.tensor(12345)
    children = fold(key, torch.arange(10_000))
    assert len(set(children.tolist())) == 10_000
