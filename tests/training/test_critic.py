"""The critic's values and gradients against separate rows of a plain model, whatever the packs and ranks."""

import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from rft_platform.algorithms.spec import CriticSpec, OptimizerSpec
from rft_platform.common.errors import NonFiniteError, UserError
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop.critic_step import accumulate_value_gradients, step_critic
from rft_platform.training.models.critic import Critic, PackedCritic, load_critic
from rft_platform.training.models.optimizer import build_optimizer
from rft_platform.training.packed.packed_policy import set_values
from tests.support.builders import gradients

CLIP = 0.2


def rows() -> list[Sample]:
    """A prompt's answers, a run of two steps, masked tokens in its middle, an untrained row, a stranger."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(5, 500, 7).tolist()
    texts = [
        [*prompt, 8, 9, 2],
        [*prompt, 8, 9, 2],
        [*prompt, 8, 30],
        [*prompt, 8, 9, 2, 40, 41, 42, 50, 51],
        rng.integers(5, 500, 12).tolist(),
        [5, 6, 7],
    ]
    samples = []
    for number, ids in enumerate(texts):
        mask = np.arange(len(ids)) >= (7 if number < 4 else 4)
        mask[10:13] &= number != 3  # an answer of a tool
        old, returns = rng.normal(size=(2, len(ids))).astype(np.float32) * 0.3
        samples.append(Sample(f"row {number}", np.array(ids, np.int32), mask, old_values=old, returns=returns))
    return samples


@pytest.fixture
def critic(tiny_model: Path, ranks: Any) -> PackedCritic:
    """With a head that tells states apart."""
    made = load_critic(tiny_model, ranks, torch.float32)
    torch.manual_seed(1)
    torch.nn.init.normal_(made.model.score.weight, std=0.1)
    return made


def plain_values(model: Any, sample: Sample) -> Tensor:
    """Values before the trained tokens from one forward of the row alone, with transformers' own attention."""
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(sample.token_ids).long()[None]
    return model(input_ids=ids).logits[0, :, 0][torch.from_numpy(np.flatnonzero(sample.loss_mask)) - 1]


def plain_loss(model: Any, samples: list[Sample]) -> Tensor:
    losses = []
    for sample in samples:
        if not sample.loss_mask.any():
            continue
        old, returns = (torch.from_numpy(x[sample.loss_mask]) for x in (sample.old_values, sample.returns))
        value = plain_values(model, sample)
        clipped = old + (value - old).clamp(-CLIP, CLIP)
        losses.append(0.5 * torch.maximum((value - returns) ** 2, (clipped - returns) ** 2))
    return torch.cat(losses).mean()


def copy_of(critic: PackedCritic, tiny_model: Path, ranks: Any) -> PackedCritic:
    other = load_critic(tiny_model, ranks, torch.float32)
    other.load_state_dict(critic.state_dict())
    return other


@pytest.mark.parametrize("budget", [10_000, 9])
def test_values_are_those_of_separate_rows(critic: PackedCritic, budget: int) -> None:
    samples = rows()
    set_values(critic, "old_values", samples, budget)
    for sample in samples:
        assert sample.old_values is not None and not sample.old_values[~sample.loss_mask].any()
    with torch.no_grad():
        want = [plain_values(critic.model, sample).numpy() for sample in samples]
    for sample, values in zip(samples, want, strict=True):
        np.testing.assert_allclose(sample.old_values[sample.loss_mask], values, atol=1e-5)
    assert np.std(np.concatenate(want)) > 0.1


@pytest.mark.parametrize("budget", [10_000, 9])
def test_loss_and_gradients_are_the_formula(critic: PackedCritic, tiny_model: Path, ranks: Any, budget: int) -> None:
    samples, plain = rows(), copy_of(critic, tiny_model, ranks).model
    loss = plain_loss(plain, samples)
    loss.backward()
    want = gradients(plain)
    metrics = accumulate_value_gradients(critic, samples, CLIP, max_tokens_per_pack=budget)
    got = gradients(critic.model)
    assert metrics["value_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert 0 < metrics["value_clip_fraction"] < 1
    assert got.keys() == want.keys() and {"score.weight", "score.bias"} < got.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4)


def test_two_ranks_with_uneven_shares_equal_one(critic: PackedCritic, tiny_model: Path, ranks: Any) -> None:
    samples = rows()
    one = accumulate_value_gradients(critic, samples, CLIP, max_tokens_per_pack=9)
    want = gradients(critic.model)
    critics = [copy_of(critic, tiny_model, ranks) for _ in range(2)]
    barrier, given, metrics = threading.Barrier(2, timeout=60), dict[int, Tensor](), dict[int, dict[str, float]]()

    def work(rank: int) -> None:
        def reduce(values: Tensor, op: Literal["sum", "max"]) -> Tensor:
            given[rank] = values
            barrier.wait()
            both = torch.stack([given[0], given[1]])
            barrier.wait()
            return both.sum(0) if op == "sum" else both.amax(0)

        mine = samples[:1] if rank == 0 else samples[1:]
        metrics[rank] = accumulate_value_gradients(
            critics[rank], mine, CLIP, max_tokens_per_pack=9, reduce=reduce, world_size=2
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [gradients(other.model) for other in critics]
    assert metrics[0] == metrics[1] == pytest.approx(one, abs=1e-6)
    for name, gradient in want.items():
        torch.testing.assert_close((found[0][name] + found[1][name]) / 2, gradient, atol=1e-5, rtol=1e-4)


def test_a_new_critic_values_every_state_at_zero(tiny_model: Path, ranks: Any) -> None:
    samples = rows()
    set_values(load_critic(tiny_model, ranks, torch.float32), "old_values", samples, 100)
    assert not any(np.any(sample.old_values) for sample in samples)


def test_a_token_classifier_with_one_label_is_taken_with_its_head(
    critic: PackedCritic, ranks: Any, tmp_path: Path
) -> None:
    critic.model.save_pretrained(tmp_path / "critic")
    again, samples, others = load_critic(tmp_path / "critic", ranks, torch.float32), rows(), rows()
    set_values(critic, "old_values", samples, 100)
    set_values(again, "old_values", others, 100)
    for sample, other in zip(samples, others, strict=True):
        np.testing.assert_array_equal(sample.old_values, other.old_values)


def test_what_cannot_be_a_critic_is_refused(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config.json"):
        load_critic(tmp_path / "nothing", ranks, torch.float32)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match="transformers cannot make a value model of it"):
        load_critic(tmp_path / "other", ranks, torch.float32)


def test_a_step_that_is_not_finite_is_refused_and_names_the_row(critic: PackedCritic) -> None:
    samples = rows()
    assert samples[4].returns is not None
    samples[4].returns[6] = np.inf
    spec = CriticSpec(optimizer=OptimizerSpec(lr=1e-3))
    held = Critic(critic, build_optimizer(critic.model, spec.optimizer), 0, None)
    with pytest.raises(NonFiniteError, match=r"step 8 was refused: .*1 rows .* check the judge's rewards: row 4\."):
        step_critic(
            held, spec, samples, step=7, max_tokens_per_pack=100, reduce=lambda values, op: values, world_size=1
        )
    assert held.updates == 0 and not held.optimizer.state


def test_the_learning_rate_follows_the_critics_own_updates(critic: PackedCritic) -> None:
    spec = CriticSpec(optimizer=OptimizerSpec(lr=1e-5, lr_warmup_steps=4))
    held = Critic(critic, build_optimizer(critic.model, spec.optimizer), 2, None)
    settings = {"max_tokens_per_pack": 100, "reduce": lambda values, op: values, "world_size": 1}
    losses = []
    for step in (700, 701):
        metrics = step_critic(held, spec, rows(), step=step, **settings)
        losses.append(metrics["value_loss"])
        assert metrics["critic_lr"] == pytest.approx(1e-5 * (step - 700 + 3) / 4)
    assert held.updates == 4 and losses[1] < losses[0]
