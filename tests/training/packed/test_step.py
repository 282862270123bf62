"""One optimiser step: the loss and gradients that the formulas give, whatever the packs, micro-batches and ranks."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import ThreadRanks
from torch import Tensor

from rft_platform.algorithms.losses.registry import LOSSES, TokenBatch, TokenLoss, loss
from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.common.errors import UserError
from rft_platform.training.data.samples import Sample, demonstration_sample, rollout_sample
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.packed import lm_head
from rft_platform.training.packed.packed_policy import PackedPolicy, score
from tests.support.builders import gradients

SPECS = {
    "grpo": AlgorithmSpec(),
    "seq-mean-token-mean": AlgorithmSpec(loss_agg_mode="seq-mean-token-mean"),
    "seq-mean-token-sum": AlgorithmSpec(loss_agg_mode="seq-mean-token-sum"),
    "seq-mean-token-sum-norm": AlgorithmSpec(loss_agg_mode="seq-mean-token-sum-norm", loss_norm_length=8),
    "kl and entropy": AlgorithmSpec(beta=0.05, kl_loss="k3", entropy_coef=0.01),
    "masks": AlgorithmSpec(token_mask=(0.1, 5.0), row_mask=(0.2, 3.0)),
    "sft": AlgorithmSpec(policy_loss="sft"),
}


#: Metrics that say how the work was split, and so depend on it.
OF_THE_SPLIT = {"packs", "tokens_computed", "computed_share", "padding_share", "flops", "flops_share", "rank_balance"}


def plain_loss(model: Any, samples: list[Sample], spec: AlgorithmSpec) -> Tensor:
    """The step's loss written down naively: one forward a row, formulas as in the textbook."""
    per_row = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids).long()
        where = torch.from_numpy(np.flatnonzero(sample.loss_mask))
        log_softmax = (model(input_ids=ids[None]).logits[0] / sample.temperature).log_softmax(-1)[where - 1]
        logp = log_softmax.gather(1, ids[where, None])[:, 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        assert sample.rollout_logprobs is not None
        assert sample.reference_logprobs is not None
        ratio = (logp - torch.from_numpy(sample.rollout_logprobs)[where]).exp()
        a = torch.tensor(sample.advantage)
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
        loss = torch.minimum(loss, -3 * a) if a < 0 else loss
        if spec.policy_loss == "sft":
            loss = -logp
        if spec.token_mask:
            loss = loss * ((ratio >= spec.token_mask[0]) & (ratio <= spec.token_mask[1]))
        if spec.row_mask:
            mean = ratio.log().mean().exp()
            loss = loss * ((mean >= spec.row_mask[0]) & (mean <= spec.row_mask[1]))
        d = torch.from_numpy(sample.reference_logprobs)[where] - logp
        kl = ratio.detach().clamp(max=2) * (d.exp() - d - 1)
        per_row.append(loss + spec.beta * kl - spec.entropy_coef * entropy)
    if spec.loss_agg_mode == "token-mean":
        return torch.cat(per_row).mean()
    if spec.loss_agg_mode == "seq-mean-token-mean":
        return torch.stack([row.mean() for row in per_row]).mean()
    return torch.stack([row.sum() for row in per_row]).mean() / (spec.loss_norm_length or 1)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("max_tokens", [10_000, 12, 1])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_loss_and_gradients_are_the_formulas_for_any_packs(
    rows: list[Sample], make_model: Callable[..., Any], spec: AlgorithmSpec, max_tokens: int
) -> None:
    plain, model = make_model(), make_model()
    want = plain_loss(plain, rows, spec)
    want.backward()
    metrics = accumulate_gradients(PackedPolicy(model), rows[::-1], spec, max_tokens_per_pack=max_tokens)
    assert metrics["loss"] == pytest.approx(want.item(), abs=1e-5)
    assert_same(gradients(model), gradients(plain))


WHOLE_ROWS = {
    "veto": AlgorithmSpec(token_veto=0.02),
    "row mask": AlgorithmSpec(row_mask=(0.05, 3.0)),
    "sequence weight": AlgorithmSpec(policy_loss="reinforce", weight_level="sequence"),
    "sequence ratio": AlgorithmSpec(policy_loss="gspo", loss_agg_mode="seq-mean-token-mean"),
}


@pytest.mark.parametrize("spec", WHOLE_ROWS.values(), ids=WHOLE_ROWS)
def test_what_depends_on_whole_rows_is_the_same_for_any_chunks(
    rows: list[Sample], make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, spec: AlgorithmSpec
) -> None:
    model = make_model()
    policy = PackedPolicy(model)
    at_once = accumulate_gradients(policy, rows, spec, max_tokens_per_pack=1000)
    want = gradients(model)
    monkeypatch.setattr(lm_head, "CHUNK_ELEMENTS", model.config.vocab_size)
    assert accumulate_gradients(policy, rows, spec, max_tokens_per_pack=1000) == pytest.approx(at_once, abs=1e-6)
    assert_same(gradients(model), want)
    for metric in {"row_vetoed", "row_masked"} & at_once.keys():
        assert 0 < at_once[metric] < 1, "some rows are left out, others are not"


def run_ranks(
    shares: list[list[Sample]], spec: AlgorithmSpec, make_model: Callable[..., Any], max_tokens: int
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of every rank, and the gradients averaged over ranks as FSDP does."""
    ranks, models = ThreadRanks(len(shares)), [make_model() for _ in shares]
    metrics: dict[int, dict[str, float]] = {}

    def work(rank: int) -> None:
        metrics[rank] = accumulate_gradients(
            PackedPolicy(models[rank]),
            shares[rank],
            spec,
            max_tokens_per_pack=max_tokens,
            reduce=ranks.reduce_of(rank),
            world_size=ranks.size,
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [gradients(model) for model in models]
    assert all(g.keys() == found[0].keys() for g in found)
    averaged = {name: torch.stack([g[name] for g in found]).mean(0) for name in found[0]}
    return [metrics[rank] for rank in range(ranks.size)], averaged


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_ranks_with_uneven_shares_equal_one_rank(
    rows: list[Sample], make_model: Callable[..., Any], spec: AlgorithmSpec
) -> None:
    model = make_model()
    alone = accumulate_gradients(PackedPolicy(model), rows, spec, max_tokens_per_pack=20)
    want = gradients(model)
    metrics, got = run_ranks([rows[:7], [], rows[7:]], spec, make_model, 20)
    assert_same(got, want)
    for of_rank in metrics:
        assert of_rank == metrics[0]
        for name in set(alone) - OF_THE_SPLIT:
            assert of_rank[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name


def test_one_sgd_step_gives_the_same_parameters_for_any_split(
    rows: list[Sample], make_model: Callable[..., Any]
) -> None:
    ends = []
    for max_tokens in (10_000, 1):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate_gradients(PackedPolicy(model), rows, AlgorithmSpec(), max_tokens_per_pack=max_tokens)
        optimizer.step()
        ends.append({name: p.detach() for name, p in model.named_parameters()})
    assert_same(ends[0], ends[1])


def metrics_of_equal_gradients(
    policy: PackedPolicy, rows: list[Sample], spec: AlgorithmSpec
) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics with and without ``skip_zero_advantage`` if half of the rows have advantage 0; gradients are equal."""
    for row in rows[:4]:
        row.advantage = 0.0
    kept = accumulate_gradients(policy, rows, spec, max_tokens_per_pack=100, skip_zero_advantage=False)
    want = gradients(policy.model)
    skipped = accumulate_gradients(policy, rows, spec, max_tokens_per_pack=100)
    assert_same(gradients(policy.model), want)
    assert skipped["loss"] == pytest.approx(kept["loss"], abs=1e-6)
    return skipped, kept


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_leaving_out_zero_advantages_changes_no_gradient(rows: list[Sample], policy: PackedPolicy, mode: str) -> None:
    skipped, kept = metrics_of_equal_gradients(policy, rows, AlgorithmSpec(loss_agg_mode=mode))
    assert skipped["tokens_computed"] < kept["tokens_computed"]
    assert skipped["tokens"] == kept["tokens"] == sum(int(r.loss_mask.sum()) for r in rows)
    assert skipped["zero_advantage_share"] == 0.5


@pytest.fixture
def regularised() -> Iterator[str]:
    """A user's loss with a gradient where the advantage is 0: ``(A - log rho)^2 / 2`` (Kimi k1.5)."""

    @loss("regularised")
    def squared(tokens: TokenBatch) -> TokenLoss:
        assert tokens.rollout_logprobs is not None
        return TokenLoss((tokens.advantage - (tokens.logp - tokens.rollout_logprobs)).square() / 2)

    yield "regularised"
    LOSSES.forget(__name__)


def test_a_users_loss_must_declare_that_zero_advantages_have_no_gradient(
    rows: list[Sample], policy: PackedPolicy, regularised: str
) -> None:
    got, _ = metrics_of_equal_gradients(policy, rows, AlgorithmSpec(policy_loss=regularised))
    assert got["zero_advantage_share"] == 0.5


def test_zero_advantages_are_kept_where_they_have_a_gradient(rows: list[Sample], policy: PackedPolicy) -> None:
    for row in rows:
        row.advantage = 0.0
    for spec in (AlgorithmSpec(beta=0.1), AlgorithmSpec(entropy_coef=0.1), AlgorithmSpec(policy_loss="sft")):
        metrics = accumulate_gradients(policy, rows, spec, max_tokens_per_pack=100)
        assert metrics["tokens_computed"] > 0
        told = {"zero_advantage_share", "advantage_mean"} & metrics.keys()
        assert bool(told) == (spec.policy_loss != "sft"), "demonstrations have no advantage"
        assert any(g.abs().max() > 0 for g in gradients(policy.model).values())


def test_a_step_without_any_gradient_is_a_no_op(rows: list[Sample], policy: PackedPolicy) -> None:
    for row in rows:
        row.advantage = 0.0
    metrics = accumulate_gradients(policy, rows, AlgorithmSpec(), max_tokens_per_pack=100)
    assert metrics["packs"] == 0
    assert metrics["loss"] == 0
    assert metrics["zero_advantage_share"] == 1
    assert gradients(policy.model) == {}
    assert accumulate_gradients(policy, [], AlgorithmSpec(), max_tokens_per_pack=100)["rows"] == 0


def test_first_step_on_fresh_data_is_on_policy(rows: list[Sample], policy: PackedPolicy) -> None:
    for row, logp in zip(rows, score(policy, rows, max_tokens_per_pack=7), strict=True):
        assert row.rollout_logprobs is not None
        row.rollout_logprobs[row.loss_mask] = logp
    metrics = accumulate_gradients(policy, rows, AlgorithmSpec(), max_tokens_per_pack=1000)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch_abs"] < 1e-5
    assert abs(metrics["mismatch_k3"]) < 1e-8
    assert metrics["ess"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == metrics["mismatch_outside"] == 0
    active = [r for r in rows if r.advantage]
    wanted = -sum(r.advantage * r.loss_mask.sum() for r in active) / sum(r.loss_mask.sum() for r in rows)
    assert metrics["loss"] == pytest.approx(wanted, abs=1e-5)


def test_shared_prefixes_are_reported(rows: list[Sample], policy: PackedPolicy) -> None:
    metrics = accumulate_gradients(policy, rows[:5], AlgorithmSpec(), max_tokens_per_pack=100)
    assert metrics["tokens_computed"] == 6
    assert metrics["tokens_unpacked"] == sum(len(r.token_ids) for r in rows[:5])
    assert metrics["computed_share"] == pytest.approx(6 / metrics["tokens_unpacked"])


def test_a_row_weight_scales_its_loss_alone(rows: list[Sample], policy: PackedPolicy) -> None:
    first, second = rows[0], rows[7]
    second.weight = 0.0
    both = accumulate_gradients(policy, [first, second], AlgorithmSpec(), max_tokens_per_pack=100)["loss"]
    alone = accumulate_gradients(policy, [first], AlgorithmSpec(), max_tokens_per_pack=100)["loss"]
    assert both == pytest.approx(alone * first.loss_mask.sum() / (first.loss_mask.sum() + second.loss_mask.sum()))


def test_missing_log_probs_are_user_errors(rows: list[Sample], policy: PackedPolicy) -> None:
    bare = demonstration_sample("demo-7", [1, 2, 3], [False, True, True])
    bare.advantage = 1.0
    with pytest.raises(UserError, match="row demo-7 has no rollout log-probs"):
        accumulate_gradients(policy, [bare], AlgorithmSpec(), max_tokens_per_pack=100)
    accumulate_gradients(policy, [bare], AlgorithmSpec(policy_loss="sft"), max_tokens_per_pack=100)
    rows[0].reference_logprobs = None
    with pytest.raises(UserError, match="row row has no reference log-probs: a KL to the reference"):
        accumulate_gradients(policy, rows, AlgorithmSpec(beta=0.1), max_tokens_per_pack=100)


def test_samples_check_their_shape() -> None:
    sample = rollout_sample("r", [1, 2], [3, 4], [-0.5, -0.25], [True, False], advantage=1.0, temperature=0.5)
    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert sample.loss_mask.tolist() == [False, False, True, False]
    assert sample.rollout_logprobs is not None
    assert sample.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25]
    with pytest.raises(ValueError, match="no token predicts it"):
        demonstration_sample("r", [1, 2], [True, True])
    with pytest.raises(ValueError, match="2 tokens and 1 mask values"):
        demonstration_sample("r", [1, 2], [False])
    with pytest.raises(ValueError, match="1 reference_logprobs for 4 tokens"):
        replace(sample, reference_logprobs=np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="expected a positive number"):
        replace(sample, temperature=0.0)


def test_an_lm_head_that_is_not_plain_is_refused(model: Any) -> None:
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        PackedPolicy(model)
