"""Expert demonstrations among rollouts: their share of the loss, their place in the steps, and what is refused."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rft_platform.algorithms.objective import Objective
from rft_platform.algorithms.spec import AlgorithmSpec, ExpertSchedule, OptimizerSpec
from rft_platform.common.errors import TrainingCancelled, UserError
from rft_platform.common.files import write_json
from rft_platform.training.checkpoint.reading import read_position
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.loop.plan import Planner
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.models.loading import load_policy
from rft_platform.training.packed.packed_policy import PackedPolicy
from rft_platform.training.protocol import StepEvent, TrainRequest
from tests.support.builders import train

ANSWERS = [(f"{a}+{b}=?", str(a + b)) for a, b in [(1, 2), (30, 4), (55, 6), (7, 80), (12, 12)]]


def mix(weight: float, **fields: Any) -> AlgorithmSpec:
    return AlgorithmSpec(policy_loss="mix", expert_weight=weight, **fields)


@pytest.fixture
def mixed_request(round_request: Callable[..., TrainRequest], tmp_path: Path) -> Callable[..., TrainRequest]:
    def make(weight: float = 0.25, **fields: Any) -> TrainRequest:
        file = tmp_path / "experts.parquet"
        pq.write_table(pa.table({"prompt": [p for p, _ in ANSWERS], "response": [a for _, a in ANSWERS]}), file)
        return round_request(**({"algorithm": mix(weight), "demonstrations": str(file)} | fields))

    return make


def rows(count: int, seed: int, *, expert: bool) -> list[Sample]:
    rng, found = np.random.default_rng(seed), []
    for index in range(count):
        tokens = rng.integers(5, 500, rng.integers(6, 14)).astype(np.int32)
        mask = np.arange(len(tokens)) >= 4
        behaviour = np.where(mask, -6.2, 0).astype(np.float32)
        found.append(Sample(f"{expert}-{index}", tokens, mask, None if expert else behaviour, expert=expert))
        found[-1].advantage = 0.0 if expert else float(rng.normal())
    return found


def gradient(policy: PackedPolicy, samples: list[Sample], spec: AlgorithmSpec, pack: int) -> tuple[dict, torch.Tensor]:
    metrics = accumulate_gradients(policy, samples, spec, max_tokens_per_pack=pack)
    flat = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    policy.zero_grad()
    return metrics, flat


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_each_part_is_normalised_by_its_own_count(ranks: Any, tiny_model: Path, mode: str, weight: float) -> None:
    policy = load_policy(tiny_model, ranks, torch.float32)
    sampled, shown = rows(5, 0, expert=False), rows(3, 1, expert=True)
    plain = [replace(row, expert=False) for row in shown]
    on_rollouts, by_rollouts = gradient(policy, sampled, AlgorithmSpec(loss_agg_mode=mode), 1000)
    on_experts, by_experts = gradient(policy, plain, AlgorithmSpec(policy_loss="sft", loss_agg_mode=mode), 1000)
    for pack in (1000, 20):
        metrics, both = gradient(policy, shown + sampled, mix(weight, loss_agg_mode=mode), pack)
        want = (1 - weight) * on_rollouts["loss"] + weight * on_experts["loss"]
        assert metrics["loss"] == pytest.approx(want, abs=1e-5)
        torch.testing.assert_close(both, (1 - weight) * by_rollouts + weight * by_experts, atol=1e-5, rtol=1e-4)


def test_the_share_follows_its_schedule() -> None:
    """CHORD-mu: linear from 0 to the peak, then half a cosine to the final share."""
    schedule = ExpertSchedule(warmup_steps=4, decay_steps=10, final=0.02)
    spec = mix(0.5, expert_schedule=schedule)
    assert [spec.at_step(step).expert_weight for step in range(5)] == [0, 0.125, 0.25, 0.375, 0.5]
    assert spec.at_step(9).expert_weight == pytest.approx((0.5 + 0.02) / 2)
    for step, cosine in ((6, np.cos(0.2 * np.pi)), (13, np.cos(0.9 * np.pi))):
        assert spec.at_step(step).expert_weight == pytest.approx(0.02 + 0.48 * (1 + cosine) / 2)
    assert spec.at_step(14).expert_weight == spec.at_step(1000).expert_weight == 0.02
    assert mix(0.5).at_step(3) == mix(0.5)


def test_a_step_has_the_share_of_its_place_in_the_run(session: TrainingSession, mixed_request: Any) -> None:
    """The first step of a run that begins at version 2 has the share of step 2."""
    schedule = ExpertSchedule(warmup_steps=4, decay_steps=0, final=0.5)
    losses = []
    for algorithm in (mix(0.5, expert_schedule=schedule), mix(0.25)):
        request = mixed_request(algorithm=algorithm, parent_version=2, max_steps=1, expert_batch_size=2)
        losses.append(train(session, request)[1][0].metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_experts_are_not_measured_against_the_engine(ranks: Any, tiny_model: Path) -> None:
    policy = load_policy(tiny_model, ranks, torch.float32)
    masked = mix(0.5, token_mask=(0.5, 2.0), row_mask=(0.5, 2.0))
    metrics, by_masked = gradient(policy, rows(4, 1, expert=True), masked, 1000)
    assert metrics["mismatch_abs"] == metrics["mismatch_k3"] == metrics["token_masked"] == metrics["row_masked"] == 0
    sft = AlgorithmSpec(policy_loss="sft")
    _, want = gradient(policy, [replace(r, expert=False) for r in rows(4, 1, expert=True)], sft, 1000)
    torch.testing.assert_close(by_masked, 0.5 * want, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_round_is_trained_with_demonstrations_in_every_step(
    session: TrainingSession, mixed_request: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    result, events = train(session, mixed_request())
    assert result.steps == 3
    assert [event.metrics["rows"] for event in events] == [20, 20, 20]  # 16 rollouts, a quarter as many experts
    assert events[0].metrics["reward_mean"] == 0.5
    few, events = train(session, mixed_request(expert_batch_size=2, output=str(tmp_path / "few")))
    assert [event.metrics["rows"] for event in events] == [18, 18, 18]
    assert few.weights_digest != result.weights_digest


@pytest.mark.slow
def test_demonstrations_continue_where_the_parent_stopped(
    session: TrainingSession, mixed_request: Callable[..., TrainRequest], ranks: Any, tmp_path: Path
) -> None:
    first, _ = train(session, mixed_request(max_steps=1))
    following = mixed_request(parent=first.checkpoint, parent_version=1, max_steps=1, output=str(tmp_path / "next"))
    second, _ = train(session, following)
    again, _ = train(TrainingSession(ranks, "float32"), replace(following, output=str(tmp_path / "again")))
    other, _ = train(session, replace(following, data_position=0, output=str(tmp_path / "other")))
    assert second.weights_digest == again.weights_digest != other.weights_digest


def test_rounds_of_different_seeds_show_every_demonstration_once(
    mixed_request: Callable[..., TrainRequest], tiny_model: Path, tmp_path: Path
) -> None:
    parent, shown = Path(shutil.copytree(tiny_model, tmp_path / "parent")), []
    (parent / "trainer_state").mkdir()
    for number in range(1, len(ANSWERS) + 1):
        request = mixed_request(seed=7 + number, expert_seed=7, max_steps=1, expert_batch_size=1)
        plan = Planner().plan(request, parent, "parent", Objective.build(request.algorithm))
        taken = (plan.rows.samples[row] for step in plan.steps for row in step)
        shown += [sample.row_id for sample in taken if sample.expert]
        assert plan.position is not None
        write_json(parent / "trainer_state" / "state.json", {"position": asdict(plan.position)})
    assert len(shown) == len(set(shown)) == len(ANSWERS)


def test_the_position_after_a_step_counts_demonstrations(
    mixed_request: Callable[..., TrainRequest], tiny_model: Path
) -> None:
    request = mixed_request(data_position=3)
    plan = Planner().plan(request, tiny_model, "parent", Objective.build(request.algorithm))
    positions = [plan.position_after(steps) for steps in range(4)]
    assert [position and position.rows for position in positions] == [3, 7, 11, 15]


@pytest.mark.slow
def test_a_training_that_was_cut_off_ends_equal(
    session: TrainingSession, mixed_request: Callable[..., TrainRequest], ranks: Any, tmp_path: Path
) -> None:
    request = mixed_request(save_interval=1)
    straight, _ = train(session, replace(request, output=str(tmp_path / "straight")))
    done: list[StepEvent] = []
    with pytest.raises(TrainingCancelled):
        session.train(request, done.append, lambda: len(done) == 2)
    resumed, events = train(TrainingSession(ranks, "float32"), request)
    assert resumed.weights_digest == straight.weights_digest
    assert [replace(event, reported_before=False) for event in events[:2]] == done
    assert read_position(Path(resumed.checkpoint)) == read_position(Path(straight.checkpoint))


@pytest.mark.slow
def test_demonstrations_train_without_a_reward_signal(
    session: TrainingSession, mixed_request: Callable[..., TrainRequest]
) -> None:
    def flatten(rollouts: list[Any], judged: list[Any]) -> None:
        for judgement in judged:
            judgement.advantage = 0.0

    request = mixed_request(0.5, edit=flatten, epochs=8, optimizer=OptimizerSpec(lr=3e-3))
    result, events = train(session, request)
    assert result.steps == 24
    first, last = (event.metrics["loss"] for event in (events[0], events[-1]))
    assert last < first / 2


def test_what_cannot_be_mixed_is_refused(session: TrainingSession, mixed_request: Callable[..., TrainRequest]) -> None:
    with pytest.raises(UserError, match="it takes rollouts and demonstrations"):
        train(session, mixed_request(demonstrations=None))
    with pytest.raises(UserError, match="takes one of rollouts"):
        train(session, mixed_request(algorithm=AlgorithmSpec()))
    with pytest.raises(UserError, match="the loss 'ppo' cannot train on demonstrations"):
        train(session, mixed_request(algorithm=AlgorithmSpec(expert_weight=0.5)))
    with pytest.raises(UserError, match=r"expert_weight is 1\.5"):
        train(session, mixed_request(1.5))
    with pytest.raises(UserError, match="expert_batch_size is 0"):
        train(session, mixed_request(expert_batch_size=0))
    with pytest.raises(UserError, match="'reinforce_plus_plus' is computed from rewards"):
        train(session, mixed_request(algorithm=mix(0.5, token_advantage="reinforce_plus_plus")))
