"""PPO with its critic through a training session: what it learns, and that it resumes exactly."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from rft_platform.algorithms.spec import AlgorithmSpec, CriticSpec, KlPenaltySpec, LoraSpec, OptimizerSpec
from rft_platform.common.errors import NonFiniteError, TrainingCancelled, UserError
from rft_platform.common.files import read_json
from rft_platform.training.data.samples import Sample, rollout_sample
from rft_platform.training.loop.precompute import Precompute
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.loop.training_run import TrainingRun
from rft_platform.training.packed.packed_policy import set_values
from rft_platform.training.protocol import StepEvent, TrainRequest, TrainResult

CRITIC = CriticSpec(optimizer=OptimizerSpec(lr=1e-3))
PPO = AlgorithmSpec(policy_loss_args={"clip_low": 0.2, "clip_high": 0.2}, token_advantage="gae", critic=CRITIC)


def train(session: TrainingSession, request: TrainRequest, events: list[StepEvent] | None = None) -> TrainResult:
    return session.train(request, (events if events is not None else []).append, lambda: False)


def after(request: TrainRequest, result: TrainResult, **changes: Any) -> TrainRequest:
    return replace(request, parent=result.checkpoint, parent_version=result.policy_version, **changes)


def tensors(folder: str) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint: policy, critic, and the moments of both."""
    root = Path(folder)
    return {
        f"{file.relative_to(root)}:{name}": value.float().numpy()
        for file in sorted(root.rglob("*.safetensors"))
        for name, value in load_tensors(file).items()
    }


def difference(one: str, other: str) -> float:
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    assert any("critic" in name and "exp_avg" in name for name in a) and any("critic/model" in name for name in a)
    return max(float(np.abs(a[name].astype(np.float64) - b[name]).max()) for name in a)


def critic_file(result: TrainResult) -> Path:
    return Path(result.checkpoint) / "trainer_state" / "critic" / "model.safetensors"


def updates(result: TrainResult) -> int:
    return read_json(critic_file(result).with_name("updates.json"))["updates"]


def two_steps(rows: list, judged: list) -> None:
    """Pairs of runs become one run of two steps, the second of which continues the first."""
    for number, (row, judgement) in enumerate(zip(rows, judged, strict=True)):
        first = rows[number - number % 2]
        step = number % 2
        for record in (row, judgement):
            record.run_id, record.step = first.run_id, step
        judgement.advantage = 0.0
        if step:
            row.call.prompt_ids = [*first.prompt_ids, *first.response_ids, 7, 8, 9]
        else:
            judgement.reward = 0.5


def prepared_rows(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """The rows of every training from now on, as they are before its first step."""
    given: list[Sample] = []
    compute = Precompute.compute

    def remember(self: Precompute, run: TrainingRun) -> None:
        compute(self, run)
        given.extend(copy.copy(sample) for sample in run.plan.rows.samples)

    monkeypatch.setattr(Precompute, "compute", remember)
    return given


@pytest.mark.slow
def test_ppo_learns_a_bandit(
    session: TrainingSession, tiny_model: Path, round_request: Callable[..., TrainRequest]
) -> None:
    """Four contexts of very different worth; in each, one half of the 512 arms pays 1 more than the other half."""
    rng = np.random.default_rng(0)
    contexts = [[11, 21, 31], [12, 22, 32], [13, 23, 33], [14, 24, 34]]
    pays = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"][:, : len(contexts)] > 0

    def play(rows: list, judged: list, policy: list[np.ndarray]) -> None:
        for number, (row, judgement) in enumerate(zip(rows, judged, strict=True)):
            context = number // 4 % len(contexts)
            logp = policy[context]
            arm = int(rng.choice(512, p=np.exp(logp) / np.exp(logp).sum()))
            row.call.prompt_ids, row.call.response_ids = contexts[context], [arm]
            row.call.rollout_logprobs, row.loss_mask = [float(logp[arm])], [True]
            judgement.reward, judgement.advantage = pays[arm, context] + 0.5 * context, 0.0

    def won(policy: list[np.ndarray]) -> float:
        return float(np.mean([np.exp(logp) @ pays[:, context] for context, logp in enumerate(policy)]))

    policy = [np.full(512, -np.log(512))] * len(contexts)
    events: list[StepEvent] = []
    result = None
    for number in range(6):
        request = round_request(
            number, groups=48, runs=4, edit=functools.partial(play, policy=policy), algorithm=PPO,
            optimizer=OptimizerSpec(lr=4e-3), train_batch_size=48, epochs=2,
        )  # fmt: skip
        result = train(session, request if result is None else after(request, result), events)
        scores = session.score([[*context, arm] for context in contexts for arm in range(512)])
        policy = list(np.array([row[-1] for row in scores]).reshape(len(contexts), 512))
    assert won([np.full(512, -np.log(512))] * len(contexts)) == pytest.approx(0.5, abs=0.05)
    assert won(policy) > 0.85
    assert events[0].metrics["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert np.mean([event.metrics["explained_variance"] for event in events[-4:]]) > 0.6


@pytest.mark.slow
def test_values_and_advantages_are_made_of_whole_runs_before_the_first_step(
    session: TrainingSession, ranks: Any, round_request: Callable[..., TrainRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second round, when values are not 0 any more: what the rows get is the definition, row after row of a run."""
    gae = {"gamma": 0.97, "lam": 0.9}
    algorithm = replace(PPO, token_advantage_args=gae)
    first = train(session, round_request(1, edit=two_steps, algorithm=algorithm))
    following = after(round_request(2, edit=two_steps, algorithm=algorithm), first)
    other = TrainingSession(ranks, "float32")
    state = other._ensure_state(Path(first.checkpoint), "", following)
    assert state.critic is not None and state.critic.updates == 3
    rows: list = []
    judged: list = []

    def keep(given: list, judgements: list) -> None:
        two_steps(given, judgements)
        rows.extend(given)
        judged.extend(judgements)

    round_request(2, edit=keep, algorithm=algorithm, output="unused")
    samples = [
        rollout_sample(r.row_id, r.prompt_ids, r.response_ids, r.rollout_logprobs, r.loss_mask, advantage=0.0)
        for r in rows
    ]
    set_values(state.critic.model, "old_values", samples, 10_000)
    wanted: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for number in range(0, len(rows), 2):
        run = samples[number : number + 2]
        value = np.concatenate([s.old_values[s.loss_mask] for s in run]).astype(np.float64)
        reward = np.zeros(len(value))
        reward[-1] = judged[number + 1].reward
        advantage, carried = np.zeros(len(value)), 0.0
        for t in reversed(range(len(value))):
            following_value = value[t + 1] if t + 1 < len(value) else 0.0
            carried = reward[t] + 0.97 * following_value - value[t] + 0.97 * 0.9 * carried
            advantage[t] = carried
        length = int(run[0].loss_mask.sum())
        for sample, part in zip(run, (slice(0, length), slice(length, None)), strict=True):
            wanted[sample.row_id] = advantage[part], (advantage + value)[part]
    every = np.concatenate([advantage for advantage, _ in wanted.values()])
    given = prepared_rows(monkeypatch)
    train(session, following)
    assert len(given) == len(wanted) == 48
    for sample in given:
        advantage, returns = wanted[sample.row_id]
        whitened = (advantage - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(sample.advantage[sample.loss_mask], whitened, atol=1e-4)
        np.testing.assert_allclose(sample.returns[sample.loss_mask], returns, atol=1e-5)
        assert not sample.advantage[~sample.loss_mask].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "lora"),
    [("float32", None), ("bfloat16", None), ("float32", LoraSpec(rank=4, alpha=8))],
    ids=["full", "bfloat16", "lora"],
)
def test_a_resumed_critic_equals_an_undisturbed_one(
    ranks: Any, round_request: Callable[..., TrainRequest], tmp_path: Path, dtype: str, lora: LoraSpec | None
) -> None:
    session = TrainingSession(ranks, dtype)
    request, following = (round_request(seed, algorithm=PPO, lora=lora) for seed in (1, 2))
    middle = train(session, request)
    straight = train(session, after(following, middle))  # the state is still held
    resumed = train(TrainingSession(ranks, dtype), after(following, middle, output=str(tmp_path / "resumed")))
    assert difference(resumed.checkpoint, straight.checkpoint) == 0
    assert updates(resumed) == 6
    assert {value.dtype for value in load_tensors(critic_file(resumed)).values()} == {torch.float32}
    cold = train(session, after(following, middle, output=str(tmp_path / "cold"), fresh_optimizer=True))
    assert difference(cold.checkpoint, straight.checkpoint) > 1e-4
    assert updates(cold) == 3


@pytest.mark.slow
def test_a_cancelled_step_does_not_change_the_critic(
    session: TrainingSession, round_request: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    request, following = (round_request(seed, algorithm=PPO) for seed in (1, 2))
    middle = train(session, request)
    straight = train(session, after(following, middle))
    answers = iter([False, False, True])
    again = after(following, middle, output=str(tmp_path / "again"))
    with pytest.raises(TrainingCancelled, match="before step 3 of 3"):
        session.train(again, lambda event: None, lambda: next(answers))
    assert session.state is not None and session.state.critic is not None and session.state.critic.updates == 3
    assert difference(train(session, again).checkpoint, straight.checkpoint) == 0


@pytest.mark.slow
def test_a_killed_training_continues_from_its_last_intermediate_checkpoint(
    session: TrainingSession, ranks: Any, round_request: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    """Values and advantages of the rest are those of the parent's critic, not of the one that it had become."""
    penalty = KlPenaltySpec(coef=0.1, target=0.01, horizon=200)
    algorithm = replace(PPO, kl_penalty=penalty)
    settings = {"algorithm": algorithm, "save_interval": 1}
    first = train(session, round_request(1, reference=str(round_request(1).parent), **settings))
    following = after(round_request(2, reference=first.checkpoint, **settings), first)
    straight = train(session, following)
    broken = replace(following, output=str(tmp_path / "broken"))

    class Killed(Exception):
        """Not an error of the platform's: nothing is tidied up after it."""

    def kill(event: StepEvent) -> None:
        if event.step == 6:
            raise Killed

    with pytest.raises(Killed):
        TrainingSession(ranks, "float32").train(broken, kill, lambda: False)
    asked: list[None] = []
    resumed = TrainingSession(ranks, "float32").train(broken, lambda event: None, lambda: bool(asked.append(None)))
    assert len(asked) < 3  # it did not begin anew
    assert difference(resumed.checkpoint, straight.checkpoint) <= 1e-6


@pytest.mark.slow
def test_in_its_warm_up_the_critic_alone_is_trained(
    session: TrainingSession, ranks: Any, round_request: Callable[..., TrainRequest], tiny_model: Path, tmp_path: Path
) -> None:
    events: list[StepEvent] = []
    algorithm = replace(PPO, critic=replace(CRITIC, warmup_steps=4))
    first = train(session, round_request(1, algorithm=algorithm), events)
    before, middle = (load_file(Path(f) / "model.safetensors") for f in (tiny_model, first.checkpoint))
    assert all(np.array_equal(before[name], middle[name]) for name in before)
    assert all(event.metrics["lr"] == 0 and event.metrics["value_loss"] > 0 for event in events)
    second = after(round_request(2, algorithm=algorithm), first)
    result = train(TrainingSession(ranks, "float32"), second, events)
    assert ["loss" in event.metrics for event in events] == [False] * 4 + [True] * 2
    after_all = load_file(Path(result.checkpoint) / "model.safetensors")
    assert any(not np.array_equal(before[name], after_all[name]) for name in before)


def test_the_kl_penalty_is_taken_from_the_reward_and_adapts(
    session: TrainingSession,
    ranks: Any,
    round_request: Callable[..., TrainRequest],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference is the model itself: its KL to the sampler is what the rows' log-probs differ by."""
    spec = AlgorithmSpec(
        token_advantage="reinforce_plus_plus", token_advantage_args={"whiten": False},
        kl_penalty=KlPenaltySpec(coef=0.5, target=0.001, horizon=1000),
    )  # fmt: skip
    events: list[StepEvent] = []
    request = round_request(1, algorithm=spec, reference=str(tiny_model), max_steps=1, train_batch_size=48)
    given = prepared_rows(monkeypatch)
    first = train(session, request, events)
    kl = [(s.rollout_logprobs - s.reference_logprobs)[s.loss_mask].astype(np.float64) for s in given]
    for number, (sample, own) in enumerate(zip(given, kl, strict=True)):
        to_go = -0.5 * np.cumsum(own[::-1])[::-1]
        got = sample.advantage[sample.loss_mask] - to_go
        assert np.ptp(got) < 1e-5 and min(abs(got[0]), abs(got[0] - 1)) < 1e-5, number
    mean, count = np.concatenate(kl).mean(), len(np.concatenate(kl))
    assert events[0].metrics["kl_penalty"] == pytest.approx(mean, abs=1e-9)
    assert events[0].metrics["kl_coef"] == 0.5
    expected = 0.5 * (1 + np.clip(mean / 0.001 - 1, -0.2, 0.2) * count / 1000)
    second = round_request(2, algorithm=spec, reference=str(tiny_model), max_steps=1)
    train(TrainingSession(ranks, "float32"), after(second, first), events)  # read from disk
    assert events[1].metrics["kl_coef"] == pytest.approx(expected)
    changed = replace(spec, kl_penalty=KlPenaltySpec(coef=0.7, target=0.001))
    train(session, after(replace(second, algorithm=changed), first), events)
    assert events[2].metrics["kl_coef"] == 0.7  # another beginning was named


@pytest.mark.slow
def test_a_parent_without_a_critic_gives_its_body_and_one_with_it_is_not_lost(
    session: TrainingSession, round_request: Callable[..., TrainRequest], tiny_model: Path, tmp_path: Path
) -> None:
    plain = train(session, round_request(1, output=str(tmp_path / "plain")))
    first = train(session, after(round_request(2, algorithm=PPO), plain))
    named = replace(PPO, critic=replace(CRITIC, folder=f"{first.checkpoint}/trainer_state/critic"))
    fresh = train(session, round_request(3, algorithm=named, output=str(tmp_path / "named"), max_steps=1))
    metrics = fresh.metrics
    assert metrics["value_mean"] != 0  # it began with what the other critic had learnt
    folder = Path(first.checkpoint) / "trainer_state" / "critic"
    assert {file.name for file in folder.iterdir()} >= {"config.json", "model.safetensors", "updates.json"}
    with pytest.raises(UserError, match="does not exist"):
        train(session, round_request(4, algorithm=replace(PPO, critic=replace(CRITIC, folder=str(tmp_path / "no")))))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (replace(PPO, critic=None), "'gae' needs a critic"),
        (AlgorithmSpec(critic=CRITIC), "None uses no critic"),
        (AlgorithmSpec(kl_penalty=KlPenaltySpec(coef=0.1)), "needs a token advantage"),
        (replace(PPO, kl_penalty=KlPenaltySpec(estimator="k9")), "unknown KL estimator 'k9'"),
        (replace(PPO, token_advantage_args={"lambda": 1}), "'lambda'"),
        (replace(PPO, critic=CriticSpec(optimizer=OptimizerSpec(lr_scheduler_type="linear"))), "total_steps"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_anything_is_loaded(
    session: TrainingSession, round_request: Callable[..., TrainRequest], algorithm: AlgorithmSpec, expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        train(session, round_request(algorithm=algorithm))
    assert session.state is None


@pytest.mark.slow
def test_a_reward_that_is_not_finite_is_refused(
    session: TrainingSession, round_request: Callable[..., TrainRequest]
) -> None:
    def spoil(rows: list, judged: list) -> None:
        judged[5].reward = float("nan")

    with pytest.raises(
        NonFiniteError, match=r"1 runs have a reward that is not finite, in rows \w{32}: check the judge"
    ):
        train(session, round_request(algorithm=PPO, edit=spoil))
