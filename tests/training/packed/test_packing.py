"""The trie against a plain recursive definition, on random rows."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.training.data.samples import Sample, rollout_sample
from rft_platform.training.packed.attention import _tiles
from rft_platform.training.packed.packing import Pack, StaticLengths, pack


@st.composite
def random_rows(draw: st.DrawFn) -> list[Sample]:
    """Rows over two token ids, so that prefixes are shared at every depth; some without a trainable token."""
    rows = []
    for index in range(draw(st.integers(1, 9))):
        ids = draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
        mask = np.array([False] + [draw(st.booleans()) for _ in ids[1:]])
        temperature = draw(st.sampled_from([1.0, 0.5]))
        rows.append(Sample(str(index), np.array(ids, np.int32), mask, temperature=temperature))
    return rows


def fed(sample: Sample) -> tuple[int, ...]:
    """The tokens a row feeds to the model: up to the one that predicts its last trainable token."""
    return tuple(sample.token_ids[: np.flatnonzero(sample.loss_mask)[-1]].tolist())


def prefix_of(packed: Pack, node: int) -> tuple[int, ...]:
    """Token ids from the root to ``node``, by the ancestor rule."""
    ancestors = [j for j in range(node + 1) if node < packed.subtree_end[j]]
    return tuple(packed.input_ids[ancestors].tolist())


@given(random_rows(), st.integers(1, 40))
def test_nodes_are_the_distinct_prefixes(samples: list[Sample], max_tokens: int) -> None:
    packs = pack(samples, max_tokens)
    trained = [i for i, s in enumerate(samples) if s.loss_mask.any()]
    assert sorted(row for p in packs for row in p.rows.tolist()) == trained
    for packed in packs:
        prefixes = [prefix_of(packed, node) for node in range(len(packed.input_ids))]
        wanted = {fed(samples[i])[:n] for i in packed.rows for n in range(1, len(fed(samples[i])) + 1)}
        assert len(prefixes) == len(set(prefixes))
        assert set(prefixes) == wanted
        assert [len(p) - 1 for p in prefixes] == packed.position_ids.tolist()
        assert len(prefixes) <= max_tokens or len(packed.rows) == 1 or len({fed(samples[i]) for i in packed.rows}) == 1


@given(random_rows(), st.integers(1, 40))
def test_every_trainable_token_is_predicted_from_its_prefix(samples: list[Sample], max_tokens: int) -> None:
    starts = np.cumsum([0, *(len(s.token_ids) for s in samples)])
    seen = []
    for packed in pack(samples, max_tokens):
        heads = list(zip(packed.head_node.tolist(), packed.head_temperature.tolist(), strict=True))
        pairs = list(zip(packed.pair_head.tolist(), packed.pair_target.tolist(), strict=True))
        assert len(set(heads)) == len(heads)
        assert len(set(pairs)) == len(pairs)
        assert (np.diff(packed.pair_head) >= 0).all()
        assert (np.diff(packed.token_pair) >= 0).all()
        for pair, local, source in zip(packed.token_pair, packed.token_row, packed.token_source, strict=True):
            index = int(packed.rows[local])
            position = int(source - starts[index])
            head, target = pairs[pair]
            node, temperature = heads[head]
            assert prefix_of(packed, node) == tuple(samples[index].token_ids[:position].tolist())
            assert target == samples[index].token_ids[position]
            assert temperature == samples[index].temperature
            seen.append((index, position))
    assert sorted(seen) == [(i, int(p)) for i, s in enumerate(samples) for p in np.flatnonzero(s.loss_mask)]


@pytest.mark.slow
@given(random_rows(), st.integers(1, 40), st.randoms())
def test_order_of_rows_does_not_matter(samples: list[Sample], max_tokens: int, random: object) -> None:
    shuffled = list(samples)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for one, other in zip(pack(samples, max_tokens), pack(shuffled, max_tokens), strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
        np.testing.assert_array_equal(one.subtree_end, other.subtree_end)
        np.testing.assert_array_equal(one.pair_target, other.pair_target)


@given(random_rows(), st.integers(1, 40), st.booleans(), st.none() | st.integers(1, 80))
def test_static_packs_hold_the_same_rows(
    samples: list[Sample], max_tokens: int, share: bool, longest_row: int | None
) -> None:
    lengths = StaticLengths(longest_row)
    exact, static = (pack(samples, max_tokens, share_prefixes=share, static=given) for given in (None, lengths))
    assert sorted(row for p in static for row in p.rows) == sorted(row for p in exact for row in p.rows)
    for packed in static:
        assert packed.length == lengths.of(len(packed.input_ids), max_tokens) >= len(packed.input_ids)
    assert all(packed.length == len(packed.input_ids) for packed in exact)


def test_static_lengths_are_few_and_whole_tiles() -> None:
    lengths = StaticLengths()
    assert {lengths.of(n, 16_384) for n in range(1, 16_385)} == set(lengths.up_to(16_384)) == {4096, 16_384}
    assert {lengths.of(n, 1000) for n in range(1, 1025)} == {256, 1024}
    assert lengths.of(20_000, 16_384) == 32_768


def test_rows_that_do_not_fit_twice_have_their_own_length() -> None:
    assert StaticLengths(16_900).up_to(32_768) == (8192, 17_024, 32_768)
    assert StaticLengths(16_384).up_to(32_768) == (8192, 32_768)  # two such rows fill a pack
    assert StaticLengths(40_000).up_to(32_768) == (8192, 32_768)  # compiled in advance: nothing above the limit
    assert StaticLengths(40_000).of(35_000, 32_768) == 40_064
    assert StaticLengths(70_000).of(35_000, 32_768) == 65_536
    rows = [Sample(str(i), np.full(16_900, i, np.int32), np.arange(16_900) > 512) for i in range(4)]
    packs = pack(rows, 32_768, static=StaticLengths(16_900))
    assert [p.length for p in packs] == [17_024] * 4


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("longest", [512, 4096])
def test_little_of_static_packs_is_padding(longest: int, seed: int, share: bool) -> None:
    """Groups of 8 below prompts of many lengths, answers that end by chance."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(40):
        prompt = rng.integers(0, 1000, int(rng.integers(30, longest // 2)))
        for run in range(8):
            answer = rng.integers(0, 1000, min(longest, 1 + int(rng.geometric(2 / longest))))
            rows.append(
                rollout_sample(f"{group}-{run}", prompt, answer, np.zeros(len(answer)), answer >= 0, advantage=1.0)
            )
    packs = pack(rows, 16_384, share_prefixes=share, static=StaticLengths())
    nodes, padded = sum(len(p.input_ids) for p in packs), sum(p.length for p in packs)
    assert padded <= 1.06 * nodes + 4096  # and the last pack


def prompts_and_answers(system: int, prompt: int, answer: int, seed: int) -> list[Sample]:
    """Rows of 24 groups of 8 over one system prompt; sizes vary by half."""
    rng = np.random.default_rng(seed)

    def some(count: int) -> np.ndarray:
        return rng.integers(0, 1000, rng.integers(count // 2, 1 + 3 * count // 2))

    start, rows = rng.integers(0, 1000, system), []
    for group in range(24):
        whole = np.concatenate([start, some(prompt)])
        for run in range(8):
            ids = some(answer)
            rows.append(rollout_sample(f"{group}-{run}", whole, ids, np.zeros(len(ids)), ids >= 0, advantage=1.0))
    return rows


def total_cost(packs: list[Pack], tile_cost: float) -> float:
    """Cost in nodes: those that are computed and the tiles of attention."""
    return sum(len(p.input_ids) + tile_cost * _tiles(p)[0].sum() for p in packs)


@pytest.mark.parametrize(
    "sizes", [(10, 60, 512), (100, 60, 512), (12, 500, 600), (300, 30, 60), (600, 200, 900), (5, 30, 40)]
)
@pytest.mark.parametrize("tile_cost", [1.4, 12.0])
def test_prefixes_are_shared_only_if_that_saves_more_than_their_tiles_cost(
    sizes: tuple[int, int, int], tile_cost: float
) -> None:
    rows = prompts_and_answers(*sizes, seed=0)
    every, chosen = (pack(rows, 16_384, static=StaticLengths(), tile_cost=cost) for cost in (0.0, tile_cost))
    assert total_cost(chosen, tile_cost) <= 1.01 * total_cost(every, tile_cost)
    trained = [sorted(np.concatenate([p.token_source for p in packs]).tolist()) for packs in (every, chosen)]
    assert trained[0] == trained[1]


def test_a_few_common_tokens_of_all_prompts_are_not_shared() -> None:
    rows = prompts_and_answers(10, 60, 512, seed=1)
    every, chosen = (pack(rows, 16_384, static=StaticLengths(), tile_cost=cost) for cost in (0.0, 12.0))
    assert sum(len(p.input_ids) for p in chosen) == pytest.approx(sum(len(p.input_ids) for p in every), rel=0.01)
    assert sum(_tiles(p)[0].sum() for p in chosen) < 0.9 * sum(_tiles(p)[0].sum() for p in every)


def test_the_turns_of_a_run_stay_one_path() -> None:
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 1000, 4000)
    rows = []
    for turn in range(1, 19):
        prompt, answer = ids[: turn * 200], ids[turn * 200 :][:150]
        rows.append(rollout_sample(str(turn), prompt, answer, np.zeros(150), answer >= 0, advantage=1.0))
    (alone,) = pack(rows, 16_384, tile_cost=12.0)
    assert len(alone.input_ids) == 18 * 200 + 149


def test_best_fit_fills_packs() -> None:
    sizes = [70, 60, 50, 50, 40, 30]
    samples = [Sample(str(i), np.full(n + 1, i, np.int32), np.arange(n + 1) == n) for i, n in enumerate(sizes)]
    assert [len(p.input_ids) for p in pack(samples, 100)] == [100, 100, 100]
    assert pack([], 100) == []


def test_four_thousand_rows_pack_in_well_under_a_tenth_of_a_second() -> None:
    rng = np.random.default_rng(0)
    samples = []
    for group in range(512):
        prompt = rng.integers(3, 300, 12)
        for _ in range(8):
            response = rng.integers(3, 13, 4)
            samples.append(rollout_sample(str(group), prompt, response, np.zeros(4), np.ones(4, bool), advantage=1.0))
    spent = []
    for _ in range(3):
        begin = time.process_time()
        packs = pack(samples, 4096)
        spent.append(time.process_time() - begin)
    assert min(spent) < 0.1
    assert all(len(p.input_ids) <= 4096 for p in packs)
