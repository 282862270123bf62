"""Prefix-tree packing: compute tokens that rows share only once. Results are exactly those of separate rows.

Rows sorted by their token ids form a trie in depth-first order: each row adds the nodes after the prefix that it shares
with the previous row. A node sees only its ancestors and itself: node i sees node j iff ``j <= i < subtree_end[j]``.
So the prompt of a group, the earlier turns of a run and identical completions each become one path. The last trainable
token of a row and all tokens after it predict no trainable token, so they are not computed.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rft_platform.training.data.samples import Sample

WORTH_SHARING = 8  # sorted rows that share less than 1/8 of their tokens may be in different packs
TILE = 128  # tile size of CUDA's attention kernels; static lengths are multiples of it
#: Key tiles that a query tile saves if a prefix lies directly before the rest of a row; examples were counted with
#: ``attention._tiles``.
_TILES_SAVED = 0.6


@dataclass(frozen=True, slots=True)
class StaticLengths:
    """The few lengths to which packs are padded, so that code is compiled only for those.

    They are a quarter and the whole of the limit for a pack, and the length of the longest possible row if no two such
    rows fit into a pack: without it, a row of little more than half the limit would cost as much as a full pack.
    """

    longest_row: int | None = None  # tokens of the longest row that can occur; None: unknown

    def up_to(self, max_tokens: int) -> tuple[int, ...]:
        """The lengths for packs of at most ``max_tokens`` tokens, ascending: whole tiles of 128 tokens."""
        whole, row = _tiles(max_tokens), _tiles(self.longest_row or 0)
        return tuple(sorted({_tiles(-(-whole // 4)), *([row] if whole < 2 * row < 2 * whole else []), whole}))

    def of(self, tokens: int, max_tokens: int) -> int:
        """Length to which a pack of ``tokens`` nodes is padded.

        A row longer than ``max_tokens`` gets the length of the longest row or a multiple of the whole length, whichever
        is shorter.
        """
        fitting = [length for length in self.up_to(max_tokens) if tokens <= length]
        if fitting:
            return fitting[0]
        multiple, row = -(-tokens // _tiles(max_tokens)) * _tiles(max_tokens), _tiles(self.longest_row or 0)
        return min(multiple, row) if tokens <= row else multiple


def _tiles(tokens: int) -> int:
    return -(-tokens // TILE) * TILE


@dataclass(slots=True)
class Pack:
    """Some rows as one trie of T nodes, with the predictions to make from it.

    A head is a distinct (node, temperature) whose next-token distribution is needed; a pair is a distinct (head, target
    token); a token is one trainable token of one row. Pairs are sorted by head and tokens by pair, so a range of heads
    is also a range of pairs and a range of tokens.
    """

    length: int  # tokens that the device computes: T, or the static length to which T is padded
    input_ids: np.ndarray  # int64 [T]
    position_ids: np.ndarray  # int64 [T], depth in the trie
    subtree_end: np.ndarray  # int64 [T], one past the last descendant
    rows: np.ndarray  # int64 [R], index of each row among the samples, in depth-first order
    row_start: np.ndarray  # int64 [R + 1], row r adds the nodes row_start[r]:row_start[r + 1]
    path: np.ndarray  # int64, the nodes of every row, concatenated
    path_start: np.ndarray  # int64 [R + 1]
    head_node: np.ndarray  # int64 [H]
    head_temperature: np.ndarray  # float32 [H]
    pair_head: np.ndarray  # int64 [P], ascending
    pair_target: np.ndarray  # int64 [P]
    token_pair: np.ndarray  # int64 [N], ascending
    token_row: np.ndarray  # int64 [N], 0..R-1
    token_source: np.ndarray  # int64 [N], index into the concatenated token ids of all samples

    @property
    def shared(self) -> np.ndarray:
        """Length of the prefix that each row shares with the rows before it, int64 [R]."""
        return np.diff(self.path_start) - np.diff(self.row_start)


def pack(
    samples: Sequence[Sample],
    max_tokens: int,
    *,
    share_prefixes: bool = True,
    whole_groups: bool = False,
    static: StaticLengths | None = None,
    tile_cost: float = 0.0,
) -> list[Pack]:
    """Pack ``samples`` into tries of at most ``max_tokens`` nodes each; a longer row gets its own pack.

    Rows without a trainable token are left out. The order of the samples does not change the tries. Without
    ``share_prefixes`` every row is a separate tree. With ``whole_groups`` the rows of a group are in one pack, however
    long it gets. With ``static``, packs have one of its lengths; rows are then distributed to keep padding small. A
    prefix is not shared if the tiles of tree attention that this adds cost more than the tokens that it saves; a tile
    costs as much as ``tile_cost`` tokens (0: attention has no tiles).
    """
    rows = _sort_rows(samples)
    rows.shared[_is_costly(rows, tile_cost) if share_prefixes else slice(None)] = 0
    if not len(rows.sample):
        return []
    units = _units_of_groups(rows, samples) if whole_groups else _units(rows)
    if static is None:
        return [_build(rows, np.sort(units.ranks_of(part))) for part in _best_fit(units, max_tokens)]
    padded = partial(static.of, max_tokens=max_tokens)
    parts = _assign_static(units, max_tokens, padded)
    return [_build(rows, np.sort(units.ranks_of(part)), padded) for part in parts]


def prefix_lengths(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three int64 arrays per sample: its tokens in the model, how many of them an earlier row shares, and its heads.

    All samples are treated as packed in one trie, so the tokens that are not shared are the work that a row adds. A row
    without a trainable token has no tokens in the model.
    """
    rows, count = _sort_rows(samples), len(samples)
    length, shared, heads = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    length[rows.sample], shared[rows.sample], heads[rows.sample] = rows.length, rows.shared, rows.trainable_count
    return length, shared, heads


@dataclass(slots=True)
class _Rows:
    """Rows in lexicographic order of the tokens that they feed to the model."""

    ids: np.ndarray  # int64, the token ids of all samples, concatenated
    sample: np.ndarray  # int64 [R], index among the samples
    start: np.ndarray  # int64 [R], where the row's tokens start in ``ids``
    length: np.ndarray  # int64 [R], number of tokens up to the token that predicts the row's last trainable token
    shared: np.ndarray  # int64 [R], length of the common prefix with the previous row; 0 for the first row
    temperature: np.ndarray  # float32 [R]
    trainable: np.ndarray  # int64, positions in ``ids`` of the trainable tokens
    trainable_start: np.ndarray  # int64 [R], where the row starts in ``trainable``
    trainable_count: np.ndarray  # int64 [R]


def _sort_rows(samples: Sequence[Sample]) -> _Rows:
    lengths = np.fromiter((len(s.token_ids) for s in samples), np.int64, len(samples))
    starts = np.cumsum(lengths) - lengths
    ids = np.concatenate([s.token_ids for s in samples]) if len(samples) else np.zeros(0, np.int32)
    mask = np.concatenate([s.loss_mask for s in samples]) if len(samples) else np.zeros(0, bool)
    trainable = np.flatnonzero(mask)
    first = np.searchsorted(trainable, starts)
    count = np.searchsorted(trainable, starts + lengths) - first
    kept = np.flatnonzero(count)
    fed = trainable[first[kept] + count[kept] - 1] - starts[kept]
    # Big-endian bytes sort in the order of the ids, at memcmp speed.
    data = ids.astype(">i4").tobytes()
    keys = [data[4 * a : 4 * (a + n)] for a, n in zip(starts[kept].tolist(), fed.tolist(), strict=True)]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    sample, length = kept[order], fed[order]
    temperature = np.fromiter((samples[i].temperature for i in sample), np.float32, len(sample))
    shared = _common_prefixes(ids, starts[sample], length)
    return _Rows(
        ids.astype(np.int64),
        sample,
        starts[sample],
        length,
        shared,
        temperature,
        trainable,
        first[sample],
        count[sample],
    )


def _common_prefixes(ids: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Length of the common prefix of each row with the row before it; 0 for the first."""
    compared = np.zeros_like(length)
    compared[1:] = np.minimum(length[1:], length[:-1])
    row, offset = ragged(compared)
    differs = np.append(ids[start[row] + offset] != ids[start[row - 1] + offset], True)
    # The position of the first difference at or after each row's first comparison, if this position is in the row.
    where = np.flatnonzero(differs)
    begin = np.cumsum(compared) - compared
    return np.minimum(where[np.searchsorted(where, begin)] - begin, compared)


def _is_costly(rows: _Rows, tile_cost: float) -> np.ndarray:
    """Whether the prefix that a row shares with its predecessor costs more than it saves; bool [R].

    It is the prefix of this row and of the next rows, up to one that shares no more. If the predecessor continues after
    the prefix, the prefix lies apart from the rest of these rows. Without sharing, it would lie directly before the
    rest, and the query tiles of these rows would read fewer key tiles.
    """
    own = rows.length - rows.shared
    before = np.append(0, np.cumsum(own))
    below = np.zeros_like(own)
    later: list[int] = []  # rows that share no more than all rows between, the nearest last
    for row in range(len(own) - 1, -1, -1):
        while later and rows.shared[later[-1]] > rows.shared[row]:
            later.pop()
        below[row] = before[later[-1] if later else -1] - before[row]
        later.append(row)
    lies_apart = np.append(False, rows.length[:-1] > rows.shared[1:])
    return lies_apart & (rows.shared * TILE < _TILES_SAVED * tile_cost * below)


def ragged(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The segment of every element and its offset in the segment, for segments of ``lengths``; both int64 [sum]."""
    segment = np.repeat(np.arange(len(lengths)), lengths)
    return segment, np.arange(len(segment)) - (np.cumsum(lengths) - lengths)[segment]


@dataclass(slots=True)
class _Units:
    """Rows that should be packed together: one row, or the rows of a group."""

    ranks: np.ndarray  # int64, indices of the sorted rows, unit by unit
    start: np.ndarray  # int64 [U + 1], where each unit starts in ``ranks``
    size: np.ndarray  # int64 [U], nodes of the unit alone
    added: np.ndarray  # int64 [U], nodes that the unit adds to a pack with the previous unit

    def ranks_of(self, part: Sequence[int]) -> np.ndarray:
        """Return the sorted rows of some units."""
        return np.concatenate([self.ranks[self.start[u] : self.start[u + 1]] for u in part])

    def nodes_of(self, part: Sequence[int]) -> int:
        """Upper bound of the nodes of a pack of some units (ascending): distant units may share further nodes."""
        index = np.asarray(part)
        follows = np.append(False, np.diff(index) == 1)
        return int(np.where(follows, self.added[index], self.size[index]).sum())

    def only(self, part: Sequence[int]) -> "_Units":
        """Return some of the units (ascending), renumbered from 0."""
        index = np.asarray(part)
        follows = np.append(False, np.diff(index) == 1)
        counts = np.diff(self.start)[index]
        added = np.where(follows, self.added[index], self.size[index])
        return _Units(self.ranks_of(part), np.append(0, np.cumsum(counts)), self.size[index], added)


def _units(rows: _Rows) -> _Units:
    """Make every row a unit."""
    count = len(rows.length)
    return _Units(np.arange(count), np.arange(count + 1), rows.length, rows.length - rows.shared)


def _units_of_groups(rows: _Rows, samples: Sequence[Sample]) -> _Units:
    """Make every group a unit, ordered by first row. If groups interleave, sizes are upper bounds."""
    group = np.fromiter((samples[i].group for i in rows.sample), np.int64, len(rows.sample))
    _, first, member = np.unique(group, return_index=True, return_inverse=True)
    order = np.argsort(first[member], kind="stable")  # stable: within a group the ranks ascend
    start = np.append(np.flatnonzero(np.diff(member[order], prepend=-1)), len(order))
    added = rows.length[order] - _shared_with_next(rows.shared, order)
    alone = added.copy()
    alone[start[:-1]] = rows.length[order][start[:-1]]
    return _Units(order, start, np.add.reduceat(alone, start[:-1]), np.add.reduceat(added, start[:-1]))


def _shared_with_next(shared: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Common prefix of each sorted row in ``order`` with its predecessor in ``order``; 0 for the first."""
    low, high = np.minimum(order[1:], order[:-1]), np.maximum(order[1:], order[:-1])
    bounds = np.column_stack([low + 1, high + 1]).ravel()
    common = np.minimum.reduceat(np.append(shared, 0), bounds)[::2] if len(bounds) else bounds
    return np.append(0, common)


def _best_fit(units: _Units, max_tokens: int) -> list[list[int]]:
    """Distribute the units over packs by the heuristic "best fit decreasing".

    Adjacent units that share long prefixes are placed together, as one item.
    """
    if units.added.sum() <= max_tokens:
        return [list(range(len(units.size)))]
    starts: list[int] = []
    sizes: list[int] = []
    for u, (size, own) in enumerate(zip(units.size.tolist(), units.added.tolist(), strict=True)):
        # A unit that adds nothing (duplicate tokens) always joins the unit before it.
        if not u or (own and ((size - own) * WORTH_SHARING < size or sizes[-1] + own > max_tokens)):
            starts.append(u)
            sizes.append(size)
        else:
            sizes[-1] += own
    ends = [*starts[1:], len(units.size)]
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for run in sorted(range(len(sizes)), key=lambda r: -sizes[r]):
        at = bisect_left(room, (sizes[run], -1))
        left, target = room.pop(at) if at < len(room) else (max_tokens, len(packs))
        if target == len(packs):
            packs.append([])
        packs[target].extend(range(starts[run], ends[run]))
        insort(room, (left - sizes[run], target))
    return [sorted(part) for part in packs]


def _in_order(units: _Units, max_tokens: int) -> list[list[int]]:
    """Distribute the units over packs in their order: each pack is filled before the next one starts."""
    packs: list[list[int]] = []
    filled = 0
    for u, (size, own) in enumerate(zip(units.size.tolist(), units.added.tolist(), strict=True)):
        if not packs or filled + own > max_tokens:
            packs.append([])
            filled = size
        else:
            filled += own
        packs[-1].append(u)
    return packs


def _assign_static(units: _Units, max_tokens: int, length_of: Callable[[int], int]) -> list[list[int]]:
    """Return the distribution with less padding, best fit or in order; split the emptiest pack if that saves more.

    ``length_of`` maps the nodes of a pack to its static length.
    """
    short = length_of(1)

    def padded(packs: list[list[int]]) -> int:
        return sum(length_of(units.nodes_of(part)) for part in packs)

    packs = min((split(units, max_tokens) for split in (_in_order, _best_fit)), key=padded)
    emptiest = min(packs, key=units.nodes_of)
    if units.size[emptiest].max() > short:
        return packs
    rest = units.only(emptiest)
    parts = [[emptiest[u] for u in part] for part in min((_in_order(rest, short), _best_fit(rest, short)), key=len)]
    apart = [*(part for part in packs if part is not emptiest), *parts]
    return apart if padded(apart) < padded(packs) else packs


def _build(rows: _Rows, ranks: np.ndarray, length_of: Callable[[int], int] | None = None) -> Pack:
    """Build the trie of some sorted rows (``ranks`` ascending). ``length_of`` maps its nodes to its padded length."""
    length = rows.length[ranks]
    # Rows that are now neighbours share the minimum over the rows between them.
    shared = np.zeros(len(ranks), np.int64)
    if len(ranks) > 1:
        shared[1:] = np.minimum.reduceat(rows.shared[: ranks[-1] + 1], ranks[:-1] + 1)
    row_start, path_start = _offsets(length - shared), _offsets(length)
    row, depth = ragged(length)
    new = depth >= shared[row]
    path = _paths(row_start, path_start, shared)
    last_row = np.zeros(row_start[-1], np.int64)
    last_row[path] = row  # numpy keeps the last assignment to an index, and rows ascend
    nodes = int(row_start[-1])
    return Pack(
        length=nodes if length_of is None else length_of(nodes),
        input_ids=rows.ids[rows.start[ranks][row[new]] + depth[new]],
        position_ids=depth[new],
        subtree_end=row_start[last_row + 1],
        rows=rows.sample[ranks],
        row_start=row_start,
        path=path,
        path_start=path_start,
        **_targets(rows, ranks, path, path_start),
    )


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _paths(row_start: np.ndarray, path_start: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Nodes of every row: the shared part of the path before it, then its own nodes."""
    path = np.empty(path_start[-1], np.int64)
    nodes = np.arange(row_start[-1])
    current = np.empty(int(np.diff(path_start).max()), np.int64)
    bounds = zip(
        path_start[:-1].tolist(), path_start[1:].tolist(), shared.tolist(),
        row_start[:-1].tolist(), row_start[1:].tolist(), strict=True,
    )  # fmt: skip
    for begin, end, prefix, first, last in bounds:
        current[prefix : end - begin] = nodes[first:last]
        path[begin:end] = current[: end - begin]
    return path


def _targets(rows: _Rows, ranks: np.ndarray, path: np.ndarray, path_start: np.ndarray) -> dict[str, np.ndarray]:
    """Heads, pairs and tokens of a pack."""
    row, offset = ragged(rows.trainable_count[ranks])
    source = rows.trainable[rows.trainable_start[ranks][row] + offset]
    parent = path[path_start[row] + source - rows.start[ranks][row] - 1]
    temperatures, code = np.unique(rows.temperature[ranks], return_inverse=True)
    heads, head = np.unique(parent * len(temperatures) + code[row], return_inverse=True)
    target = rows.ids[source]
    vocabulary = int(target.max()) + 1
    pairs, pair = np.unique(head * vocabulary + target, return_inverse=True)
    order = np.argsort(pair, kind="stable")
    return {
        "head_node": heads // len(temperatures),
        "head_temperature": temperatures[heads % len(temperatures)],
        "pair_head": pairs // vocabulary,
        "pair_target": pairs % vocabulary,
        "token_pair": pair[order],
        "token_row": row[order],
        "token_source": source[order],
    }
