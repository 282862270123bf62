"""Values that rows need before the first step: log-probs of frozen models, critic values, and token advantages.

Frozen models are the reference of a KL or of preference pairs, and the teacher of a distillation. Policy and critic are
evaluated as they are when the training starts. No gradient is computed. Only values that the algorithm needs are
computed: the defaults (no KL, ratio to the rollout log-probs) need no forward pass.

Losses that protect the entropy also need how the policy's entropy depends on each sampled token. If the logit of a
token rises, the entropy H of its distribution changes by ``-S`` to first order, with ``S = p (H + log p)`` and the
token's probability p.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rft_platform.common.files import digest_json
from rft_platform.training.checkpoint.manifest import identify, verified_weights
from rft_platform.training.data.rollout_rows import TrainingRows
from rft_platform.training.data.samples import Sample
from rft_platform.training.data.token_advantages import set_token_advantages
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.distillation import check_vocabulary
from rft_platform.training.loop.kl_baseline import attach_mismatched
from rft_platform.training.loop.training_run import TrainingRun
from rft_platform.training.models.loading import load_policy
from rft_platform.training.packed.lm_head import CHUNK_ELEMENTS, LMHead
from rft_platform.training.packed.packed_policy import PackedPolicy, score, set_longest_row, set_values


@torch.no_grad()
def entropy_change(head: LMHead, *, centred: bool) -> Tensor:
    """S of each token of a pack [N]; with ``centred`` less its expectation over the distribution."""
    found = []
    for chunk in head.chunks(CHUNK_ELEMENTS):
        log_softmax = head.log_softmax(chunk)
        softmax = log_softmax.exp()
        entropy = -torch.linalg.vecdot(softmax, log_softmax)
        logp = log_softmax[chunk.pair_head, chunk.pair_target]
        change = logp.exp() * (entropy[chunk.pair_head] + logp)
        if centred:
            squares = softmax.square_()
            expected = entropy * squares.sum(-1) + torch.linalg.vecdot(squares, log_softmax)
            change = change - expected[chunk.pair_head]
        found.append(change)
    return torch.cat(found).index_select(0, head.batch.token_pair)


BLOCK = 256  # number of groups whose reference log-probs are computed together


class FrozenModel:
    """Loads and holds at most one frozen model, across requests."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype) -> None:
        self._ranks = ranks
        self._dtype = dtype
        self._loaded: tuple[str, PackedPolicy] | None = None

    def model(self, folder: Path) -> PackedPolicy:
        """Return the model in ``folder``; a different model held before is dropped.

        Raises DamagedError if it is a platform checkpoint whose files do not match its manifest.
        """
        digest: str = self._ranks.from_first(lambda: identify(folder))
        if self._loaded is None or self._loaded[0] != digest:
            self._loaded = None
            self._ranks.from_first(lambda: verified_weights(folder))
            policy = load_policy(folder, self._ranks, self._dtype, trained=False)
            policy.requires_grad_(False)
            self._loaded = (digest, policy)
        return self._loaded[1]


@dataclass(slots=True)
class Precompute:
    """The frozen models of a trainer. Each model is loaded on first use and kept."""

    reference: FrozenModel
    teacher: FrozenModel

    def compute(self, run: TrainingRun) -> None:
        """Add the values that the algorithm needs to this rank's rows of ``run``. Every rank must call it."""
        request, algorithm = run.request, run.request.algorithm
        rows = _rows_of_rank(run)
        samples = [run.plan.rows.samples[row] for row in rows]
        reduce, budget = run.ranks.reduce, request.max_tokens_per_pack
        if needs_reference(run):
            with run.watch.time("reference"):
                self._compute_reference(run)
        if request.teacher is not None:
            with run.watch.time("teacher"):
                self._compute_teacher(run, Path(request.teacher).absolute(), samples)
        if algorithm.correction == "decoupled":
            with run.watch.time("old_logprobs"):
                set_values(run.state.policy, "old_logprobs", samples, budget, reduce)
        change = run.plan.objective.policy_loss.entropy_change
        if change is not None:
            with run.watch.time("entropy_change"):
                policy, through = run.state.policy, partial(entropy_change, centred=change == "centred")
                call = partial(policy.__call__, through=through)
                set_values(policy, "entropy_change", samples, budget, reduce, call)
        if run.state.critic is not None:
            with run.watch.time("values"):
                set_values(run.state.critic.model, "old_values", samples, budget, reduce)
        if algorithm.token_advantage is not None:
            with run.ranks.failing_together() as reduce_if_all:  # bad rewards, or a user's function, on one rank
                computed = set_token_advantages(run.plan.rows, rows, algorithm, run.state.kl_control, reduce_if_all)
            run.precomputed, run.state.kl_control = computed.metrics, computed.kl_control

    def _compute_reference(self, run: TrainingRun) -> None:
        """Compute reference log-probs. If the training starts from the reference, its policy, still unchanged, is used.

        With an adapter, the base model below the adapter is used in this case. The base model is also the reference if
        the request names no reference.
        """
        request, state, mismatched = run.request, run.state, run.plan.objective.policy_loss.mismatched
        folder = state.base_model if request.reference is None else Path(request.reference).absolute()
        assert folder is not None, "the plan checks that there is a reference"
        own = state.base_model or Path(request.parent).absolute()
        digest = run.ranks.from_first(lambda: identify(folder))
        own_digest = digest if own == folder else run.ranks.from_first(lambda: identify(own))
        compute = partial(
            compute_reference,
            rows=run.plan.rows,
            needed=np.unique(np.concatenate(run.plan.steps)),
            source=digest_json([digest, request.seed, request.max_tokens_per_pack, mismatched]),
            seed=request.seed,
            max_tokens_per_pack=request.max_tokens_per_pack,
            ranks=run.ranks,
            mismatched=mismatched,
        )
        if digest == own_digest:
            with without_adapter(state.policy) as policy:
                compute(lambda: policy)
        else:
            compute(lambda: _frozen(self.reference, folder, run))

    def _compute_teacher(self, run: TrainingRun, folder: Path, samples: Sequence[Sample]) -> None:
        """Load the teacher for a distillation loss, or compute its log-probs for a token advantage."""
        student = run.state.base_model or run.state.folder
        run.ranks.from_first(lambda: check_vocabulary(student, folder))
        teacher = _frozen(self.teacher, folder, run)
        if run.plan.objective.policy_loss.teacher:
            run.teacher = teacher
        else:
            set_values(teacher, "teacher_logprobs", samples, run.request.max_tokens_per_pack, run.ranks.reduce)


def _frozen(held: FrozenModel, folder: Path, run: TrainingRun) -> PackedPolicy:
    """The model in ``folder``, for rows as long as those of ``run``."""
    policy = held.model(folder)
    set_longest_row(policy, run.request.max_tokens_per_row)
    return policy


def needs_reference(run: TrainingRun) -> bool:
    """Whether any part of the algorithm measures a distance to the reference model."""
    return run.plan.objective.needs_reference or run.request.algorithm.kl_penalty is not None


def _rows_of_rank(run: TrainingRun) -> np.ndarray:
    return np.unique(np.concatenate([run.share(step) for step in run.plan.steps]))


@contextmanager
def without_adapter(policy: PackedPolicy) -> Iterator[PackedPolicy]:
    """Yield ``policy`` with its adapter switched off, without a copy; unchanged if it has no adapter."""
    if not hasattr(policy.model, "disable_adapter"):
        yield policy
        return
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    with policy.model.disable_adapter():
        # peft freezes the adapter here, and FSDP2 keeps the requires_grad of its first all-gather: unfreeze the
        # adapter.
        for parameter in trainable:
            parameter.requires_grad_(True)
        yield policy


def compute_reference(
    load: Callable[[], PackedPolicy],
    rows: TrainingRows,
    needed: np.ndarray,
    *,
    source: str,
    seed: int,
    max_tokens_per_pack: int,
    ranks: Ranks,
    mismatched: bool = False,
) -> None:
    """Set the reference log-probs of the ``needed`` rows, unless they already have those of the same ``source``.

    Log-probs are computed for whole blocks of groups, in the order in which the stream of ``seed`` first reads the
    groups. A row is therefore always computed with the same other rows, and its values are bit-identical in every
    call. In the first pass of the stream, few rows are computed beyond the needed rows. The ranks share the work and
    exchange the results. ``load`` is called only if a value is missing. With ``mismatched``, mismatched rows are
    attached to the rows and computed with them. All ranks must make the same call.
    """
    if rows.reference_source != source:
        rows.reference_source = source
        for sample in rows.samples:
            sample.reference_logprobs = None
        if mismatched:
            attach_mismatched(rows)
    missing = np.array([rows.samples[row].reference_logprobs is None for row in needed], bool)
    if not missing.any():
        return
    policy, position = load(), _stream_positions(int(rows.group.max()) + 1, seed)[rows.group]
    order = np.argsort(position, kind="stable")
    blocks = np.split(order, np.flatnonzero(np.diff(position[order] // BLOCK)) + 1)
    number = np.searchsorted([position[block[0]] // BLOCK for block in blocks], position[needed[missing]] // BLOCK)
    for index in np.unique(number):
        members = blocks[index]
        own = position[members] % ranks.world_size == ranks.rank
        samples = [rows.samples[row] for row in members]
        if mismatched:
            samples += [sample.mismatched for sample in samples if sample.mismatched is not None]
            own = np.concatenate([own, own])
        _score_together(policy, samples, own, max_tokens_per_pack, ranks)


def _score_together(
    policy: PackedPolicy, samples: Sequence[Sample], own: np.ndarray, max_tokens_per_pack: int, ranks: Ranks
) -> None:
    """Each rank scores its ``own`` samples (bool); afterwards every rank has the values of all samples."""
    mine = [sample for sample, is_own in zip(samples, own, strict=True) if is_own]
    scored = iter(score(policy, mine, max_tokens_per_pack=max_tokens_per_pack, reduce=ranks.reduce))
    values = [
        next(scored) if is_own else np.zeros(np.count_nonzero(sample.loss_mask))
        for sample, is_own in zip(samples, own, strict=True)
    ]
    together = ranks.reduce(torch.from_numpy(np.concatenate(values).astype(np.float64)), "sum").numpy()
    ends = np.cumsum([len(row) for row in values])
    for sample, row in zip(samples, np.split(together, ends[:-1]), strict=True):
        sample.reference_logprobs = np.zeros(len(sample.token_ids), np.float32)
        sample.reference_logprobs[sample.loss_mask] = row


def _stream_positions(groups: int, seed: int) -> np.ndarray:
    """Position of each group in the first pass of the stream of ``seed``."""
    position = np.empty(groups, np.int64)
    position[np.random.default_rng([seed, 0]).permutation(groups)] = np.arange(groups)
    return position
