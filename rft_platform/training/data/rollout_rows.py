"""Read training rows from Parquet: samples, their groups, and facts that the metrics report."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rft_platform.common.errors import NAMED, NonFiniteError, StorageError, UserError, some
from rft_platform.common.files import digest_file, digest_json
from rft_platform.experience.parquet import read_table, read_tables
from rft_platform.experience.schema import JUDGED_SCHEMA, ROLLOUT_SCHEMA, list_lengths
from rft_platform.experience.selections import SELECTION_SCHEMA, STALE
from rft_platform.judging.operators.filters import DYNAMIC_SAMPLING
from rft_platform.training.data.samples import Sample, rollout_sample

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger(__name__)
_ROLLOUT_COLUMNS = [
    "row_id", "group_id", "run_id", "step", "policy_version", "token_versions", "prompt_ids", "response_ids",
    "rollout_logprobs", "loss_mask", "temperature", "top_p", "top_k", "truncated", "step_reward", "policy",
]  # fmt: skip
_JUDGED_COLUMNS = ["row_id", "reward", "advantage", "dropped_by", "masked"]


def no_masked_rows() -> dict[str, np.ndarray]:
    """The facts of no masked row."""
    whole, real = np.zeros(0, np.int64), np.zeros(0)
    return {"group": whole, "run": whole, "step": whole, "reward": real, "step_reward": real}


@dataclass(slots=True)
class TrainingRows:
    """R rows. The rows of a ``group`` stay together in one optimiser step."""

    samples: list[Sample]
    group: np.ndarray  # int64 [R], numbered from 0 in order of appearance
    digest: str  # digest of the files' contents
    facts: dict[str, np.ndarray] = field(default_factory=dict)  # [R] each: policy_version, reward, run, step, ...
    dropped: int = 0  # rows that a filter dropped
    zero_variance_groups: float | None = None  # share of all judged groups, including those dropped by a filter
    reference_source: str | None = None  # identity of the model and settings that gave the reference log-probs
    too_long: int = 0  # demonstrations or pairs that ``within`` left out
    other_sampling: int = 0  # rows left out because their log-probs are not those of the policy's distribution
    #: Facts of rows in groups of the samples that are not trained on, but whose runs' rewards count in their groups.
    masked: dict[str, np.ndarray] = field(default_factory=no_masked_rows)

    def __post_init__(self) -> None:
        for sample, group in zip(self.samples, self.group.tolist(), strict=True):
            sample.group = group

    def within(self, limit: int | None, source: str) -> "TrainingRows":
        """Leave out (and count) the groups (conversations, pairs) that have a row of more than ``limit`` tokens.

        Raises UserError if no group is left.
        """
        if limit is None:
            return self
        long = np.unique(self.group[[len(sample.token_ids) > limit for sample in self.samples]])
        if not len(long):
            return self
        all_groups = len(np.unique(self.group))
        if len(long) == all_groups:
            shortest = min(len(sample.token_ids) for sample in self.samples)
            raise UserError(
                f"{source}: all of its {all_groups:,} rows are longer than model.max_model_len {limit} (the shortest "
                f"has {shortest} tokens): increase model.max_model_len, or shorten the rows"
            )
        LOG.warning("%s: %d of %d rows longer than max_model_len %d left out", source, len(long), all_groups, limit)
        kept = np.flatnonzero(~np.isin(self.group, long))
        return replace(
            self,
            samples=[self.samples[row] for row in kept],
            group=np.unique(self.group[kept], return_inverse=True)[1],
            digest=digest_json([self.digest, limit]),
            facts={name: values[kept] for name, values in self.facts.items()},
            too_long=self.too_long + len(long),
        )

    def left_out(self) -> dict[str, float]:
        """Metrics of a training: rows that a filter dropped, that were too long, or that have another sampling."""
        return {
            "rows_dropped": float(self.dropped),
            "rows_too_long": float(self.too_long),
            "rows_other_sampling": float(self.other_sampling),
        }

    def known(self, chosen: np.ndarray) -> np.ndarray:
        """Return those ``chosen`` rows that have facts: the rollouts. Demonstrations mixed into rollouts have none."""
        return chosen[chosen < max((len(values) for values in self.facts.values()), default=0)]


def digest_files(paths: Sequence[str]) -> str:
    """Return the digest of the contents of some files, in order."""
    for path in paths:
        if not Path(path).is_file():
            raise StorageError(f"{path} does not exist: the training data is gone or was never written")
    return digest_json([digest_file(Path(path)) for path in paths])


def read_rollouts(
    rollouts: Sequence[str], judged: Sequence[str], *, policy_gradient: bool, selection: str | None = None
) -> TrainingRows:
    """Read rollout rows with their judgements, in file order. Rows that a filter dropped are left out.

    For a ``policy_gradient`` loss, rows sampled with temperature 0, top_p or top_k are left out too: such sampling
    renormalises the distribution, so their log-probs are not the policy's, and importance ratios would be wrong.
    ``selection`` is a file that names the rows to take, each once. Raises StorageError if rows and judgements do not
    match one to one, NonFiniteError with the names of rows whose numbers are not finite, and UserError if every row has
    such sampling.
    """
    import pyarrow.compute as pc

    digest = digest_files([*rollouts, *judged, *([] if selection is None else [selection])])
    if not (rollouts and judged):
        raise UserError("a training on rollouts needs at least one file of rollouts and one of judgements")
    rows = read_tables(list(map(Path, rollouts)), ROLLOUT_SCHEMA, _ROLLOUT_COLUMNS)
    judgements = read_tables(list(map(Path, judged)), JUDGED_SCHEMA, _JUDGED_COLUMNS)
    judgements = judgements.take(_matches(rows, judgements))
    every = rows.append_column("reward", judgements["reward"]).append_column("masked", judgements["masked"])
    if selection is not None:
        chosen = _chosen(rows, selection)
        rows, judgements = rows.filter(chosen), judgements.filter(chosen)
    flat = _zero_variance_share(rows, judgements)
    kept = pc.is_null(judgements["dropped_by"])
    dropped = len(rows) - pc.sum(kept).as_py() if len(rows) else 0
    rows, judgements = rows.filter(kept).combine_chunks(), judgements.filter(kept).combine_chunks()
    other = _has_other_sampling(rows) if policy_gradient else np.zeros(len(rows), bool)
    if other.any():
        rows, judgements, every = _without_other_sampling(rows, judgements, every, other)
    advantage = judgements["advantage"].to_numpy()
    samples = _samples(rows, advantage)
    group = rows["group_id"].combine_chunks().dictionary_encode()
    run = rows["run_id"].combine_chunks().dictionary_encode()
    facts = {
        "policy_version": _oldest_versions(rows),
        "truncated": rows["truncated"].to_numpy(),
        "reward": judgements["reward"].to_numpy(),
        "run": _codes(run),
        "step": rows["step"].to_numpy(),
        "step_reward": rows["step_reward"].to_numpy(),  # NaN: the step has no reward
    }
    return TrainingRows(
        samples,
        _codes(group),
        digest,
        facts,
        dropped,
        flat,
        other_sampling=int(other.sum()),
        masked=_masked(every, rows, group.dictionary, run.dictionary),
    )


def _oldest_versions(rows: "pa.Table") -> np.ndarray:
    """The oldest version of the weights that sampled a token of each row, int64 [R]."""
    oldest = np.array(rows["policy_version"].to_numpy())
    for row in np.flatnonzero(list_lengths(rows["token_versions"])):
        oldest[row] = min(rows["token_versions"][int(row)].as_py())
    return oldest


def _matches(rows: "pa.Table", judgements: "pa.Table") -> "pa.ChunkedArray":
    """For every rollout row, return the index of its judgement. Raises StorageError unless they match one to one."""
    import pyarrow.compute as pc

    ids, judged_ids = rows["row_id"], judgements["row_id"].combine_chunks()
    for name, column in (("rollouts", ids), ("judgements", judged_ids)):
        if pc.count_distinct(column).as_py() != len(column):
            raise StorageError(f"the {name} hold a row_id more than once: files of one round must not repeat rows")
    index = pc.index_in(ids, judged_ids)
    unjudged = ids.filter(pc.is_null(index))
    if len(unjudged):
        raise StorageError(f"{len(unjudged)} rollout rows have no judgement ({_few(unjudged)}): judge the round again")
    if len(judged_ids) != len(ids):
        extra = judged_ids.filter(pc.is_null(pc.index_in(judged_ids, ids.combine_chunks())))
        raise StorageError(f"{len(extra)} judgements have no rollout row ({_few(extra)}): a rollout file is missing")
    return index


def _chosen(rows: "pa.Table", selection: str) -> "pa.ChunkedArray":
    """bool [R]: whether the selection takes a row. Raises StorageError if it repeats rows or names unknown rows."""
    import pyarrow.compute as pc

    named = read_table(Path(selection), SELECTION_SCHEMA, ["row_id", "use"])
    if pc.count_distinct(named["row_id"]).as_py() != len(named):
        raise StorageError(f"{selection}: contains a row_id more than once, but a training uses each row once")
    taken = named.filter(pc.not_equal(named["use"], STALE))["row_id"].combine_chunks()
    unknown = taken.filter(pc.is_null(pc.index_in(taken, rows["row_id"].combine_chunks())))
    if len(unknown):
        raise StorageError(
            f"{selection}: {len(unknown)} of its rows are in none of the files ({_few(unknown)}): a round was "
            "explored again after this selection: launch the training again, which selects rows again"
        )
    return pc.is_in(rows["row_id"], taken)


def _has_other_sampling(rows: "pa.Table") -> np.ndarray:
    """bool [R]: the row's log-probs are not those of the policy's distribution. UserError if that holds for all."""
    temperature, top_p, top_k = (rows[name].to_numpy() for name in ("temperature", "top_p", "top_k"))
    other: np.ndarray = (temperature <= 0) | (top_p < 1.0) | (top_k > 0)
    if len(other) and other.all():
        raise UserError(
            f"all {len(other)} rows were sampled with temperature 0, top_p below 1 or top_k above 0 (row "
            f"{rows['row_id'][0]}: temperature {temperature[0]}, top_p {top_p[0]}, top_k {top_k[0]}): policy-gradient "
            "training needs temperature > 0, top_p 1 and top_k -1, otherwise importance ratios are wrong; change what "
            "the taskset's rollout_args or the workflow's calls set"
        )
    return other


def _without_other_sampling(
    rows: "pa.Table", judgements: "pa.Table", every: "pa.Table", other: np.ndarray
) -> "tuple[pa.Table, pa.Table, pa.Table]":
    """Leave out the ``other`` rows, and mark them as masked in ``every``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    masked = pc.or_(every["masked"].fill_null(False), pc.is_in(every["row_id"], rows.filter(other)["row_id"]))
    kept = pa.array(~other)
    every = every.set_column(every.column_names.index("masked"), "masked", masked)
    return rows.filter(kept).combine_chunks(), judgements.filter(kept).combine_chunks(), every


def _masked(every: "pa.Table", kept: "pa.Table", groups: "pa.Array", runs: "pa.Array") -> dict[str, np.ndarray]:
    """Facts of the masked rows among ``every`` row, if ``kept`` has rows of their group and policy.

    ``groups`` and ``runs`` are the ids of the kept rows; their indices are the numbers of groups and runs. A run that
    has masked rows only gets a further number.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    found = every.filter(pc.fill_null(every["masked"], False))
    found = found.filter(
        pc.and_(pc.is_in(found["group_id"], groups), pc.is_in(found["policy"], kept["policy"].combine_chunks()))
    )
    if not len(found):
        return no_masked_rows()
    names = pa.concat_arrays([runs, found["run_id"].combine_chunks()]).unique()
    return {
        "group": pc.index_in(found["group_id"], groups).to_numpy().astype(np.int64),
        "run": pc.index_in(found["run_id"], names).to_numpy().astype(np.int64),
        "step": found["step"].to_numpy(),
        "reward": found["reward"].to_numpy(),
        "step_reward": found["step_reward"].to_numpy(),
    }


def _samples(rows: "pa.Table", advantage: np.ndarray) -> list[Sample]:
    prompts, responses, logprobs, masks = (
        _split(rows[name]) for name in ("prompt_ids", "response_ids", "rollout_logprobs", "loss_mask")
    )
    row_ids, temperature = rows["row_id"].to_pylist(), rows["temperature"].to_numpy()
    finite = np.isfinite(advantage) & np.array([np.isfinite(values).all() for values in logprobs], bool)
    if not finite.all():
        bad = [row_ids[row] for row in np.flatnonzero(~finite)]
        raise NonFiniteError(f"{len(bad)} rows have an advantage or log-probs that are not finite: {some(bad)}")
    values = zip(row_ids, prompts, responses, logprobs, masks, advantage.tolist(), temperature.tolist(), strict=True)
    try:
        # Temperature 0 (greedy) counts as 1; only SFT trains such rows.
        return [rollout_sample(*row, advantage=a, temperature=t or 1.0) for *row, a, t in values]
    except ValueError as error:
        raise StorageError(f"the rollouts hold a row that cannot be trained on: {error}") from error


def _split(column: "pa.ChunkedArray") -> list[np.ndarray]:
    """Split a list column into one array per row; without a copy where numpy allows it."""
    lists = column.combine_chunks()
    values = lists.flatten().to_numpy(zero_copy_only=False)
    bounds = (lists.offsets.to_numpy() - lists.offsets[0].as_py()).tolist() if len(lists) else [0]
    return [values[start:stop] for start, stop in pairwise(bounds)]


def _codes(dictionary: "pa.DictionaryArray") -> np.ndarray:
    return dictionary.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _zero_variance_share(rows: "pa.Table", judgements: "pa.Table") -> float:
    """Share of the groups whose runs all have the same reward.

    A run's reward is the reward of its last step. Runs whose judgement failed are ignored. A group is ignored if all of
    its runs failed. A group also counts as equal if a filter dropped it because its rewards were equal before a
    penalty.
    """
    group, run = (_codes(rows[name].combine_chunks().dictionary_encode()) for name in ("group_id", "run_id"))
    order = np.lexsort((rows["step"].to_numpy(), run, group))
    last = order[np.append((np.diff(run[order]) != 0) | (np.diff(group[order]) != 0), True)[: len(order)]]
    reward = judgements["reward"].to_numpy()[last]
    last, reward = last[np.isfinite(reward)], reward[np.isfinite(reward)]
    groups, member = np.unique(group[last], return_inverse=True)
    high, low = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
    np.maximum.at(high, member, reward)
    np.minimum.at(low, member, reward)
    flat = high == low
    dropped_by = np.array(judgements["dropped_by"].to_pylist(), object)
    flat[member] |= dropped_by[last] == DYNAMIC_SAMPLING
    return float(flat.mean()) if len(groups) else 0.0


def _few(ids: "pa.ChunkedArray") -> str:
    return some(ids.slice(0, NAMED + 1).to_pylist())
