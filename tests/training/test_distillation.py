"""Distillation: the divergence and its gradients against dense float64, and training from a teacher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from rft_platform.algorithms.losses.gkd import generalized_jsd
from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.common.errors import UserError
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop.distillation import check_vocabulary
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.packed.packed_policy import PackedPolicy
from rft_platform.training.protocol import TrainRequest
from tests.support.builders import train

BETAS = [0.0, 0.1, 0.5, 1.0]
PAIRS = [(f"{a}+{b}=?", str(a + b)) for a, b in [(1, 2), (30, 4), (55, 6), (7, 80)]]


def gkd(beta: float, **fields: Any) -> AlgorithmSpec:
    return AlgorithmSpec(policy_loss="gkd", policy_loss_args={"beta": beta}, **fields)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * (np.log(p) - np.log(q))).sum(-1)


def divergence(student: np.ndarray, teacher: np.ndarray, beta: float) -> np.ndarray:
    """The definition, over logits, in float64."""
    s, t = np.exp(log_softmax(student)), np.exp(log_softmax(teacher))
    if beta in (0.0, 1.0):
        return kl(t, s) if beta == 0 else kl(s, t)
    m = beta * t + (1 - beta) * s
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_and_its_gradient_are_the_definition(beta: float) -> None:
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(0, 3, (2, 7, 11))
    logs = (torch.from_numpy(log_softmax(logits)) for logits in (student, teacher))
    value, gradient = generalized_jsd(*logs, beta)
    np.testing.assert_allclose(value.numpy(), divergence(student, teacher, beta), rtol=1e-10)
    wanted = np.empty_like(student)
    for column in range(student.shape[1]):
        step = np.zeros_like(student)
        step[:, column] = 1e-5
        ends = (divergence(student + sign * step, teacher, beta) for sign in (1, -1))
        wanted[:, column] = np.subtract(*ends) / 2e-5
    np.testing.assert_allclose(gradient.numpy(), wanted, atol=1e-8)


@pytest.mark.parametrize("beta", BETAS)
def test_a_student_equal_to_its_teacher_has_no_gradient(beta: float) -> None:
    logs = torch.randn(5, 9, dtype=torch.float64).log_softmax(-1)
    value, gradient = generalized_jsd(logs, logs.clone(), beta)
    assert value.abs().max() < 1e-12
    assert gradient.abs().max() < 1e-12


def test_extreme_distributions_stay_finite() -> None:
    logits = torch.tensor([[1000.0, 0.0, -1000.0], [0.0, 1000.0, -1000.0]])
    student, teacher = logits.log_softmax(-1), logits.flip(0).log_softmax(-1)
    for beta in BETAS:
        value, gradient = generalized_jsd(student, teacher, beta)
        assert torch.isfinite(value).all() and torch.isfinite(gradient).all()


def build(vocabulary: int, hidden: int, seed: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, intermediate_size=48, tie_word_embeddings=hidden == 32,
            initializer_range=0.2,
        )
    )  # fmt: skip


def samples() -> list[Sample]:
    """Rows that share a prompt, of two temperatures, one with a tool's answer in its middle."""
    rng = np.random.default_rng(1)
    prompt, rows = [1, 2, 3, 4, 5], []
    for index in range(7):
        tokens = np.array(prompt + rng.integers(0, 23, rng.integers(2, 9)).tolist(), np.int32)
        mask = np.arange(len(tokens)) >= 5
        mask[6] = mask[6] and index % 3 > 0
        rows.append(Sample(str(index), tokens, mask, temperature=0.7 if index % 2 else 1.0))
    return rows


def dense_loss(student: Any, teacher: Any, rows: list[Sample], beta: float, entropy_coef: float) -> Tensor:
    """Token mean of the definition over whole [tokens, vocabulary] tensors, one forward a row."""
    values = []
    for row in rows:
        ids, where = torch.from_numpy(row.token_ids).long()[None], torch.from_numpy(np.flatnonzero(row.loss_mask)) - 1
        s = (student(input_ids=ids).logits[0, where] / row.temperature).softmax(-1)
        with torch.no_grad():
            t = (teacher(input_ids=ids).logits[0, where] / row.temperature).softmax(-1)
        m = t if beta == 1 else s if beta == 0 else beta * t + (1 - beta) * s
        from_teacher, from_student = (t * (t / m).log()).sum(-1), (s * (s / m).log()).sum(-1)
        value = from_teacher if beta == 0 else from_student if beta == 1 else None
        value = beta * from_teacher + (1 - beta) * from_student if value is None else value
        values.append(value + entropy_coef * (s * s.log()).sum(-1))
    return torch.cat(values).mean()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("max_tokens", "chunk", "entropy_coef"), [(10_000, 1 << 27, 0.0), (12, 3 * 23, 0.3)])
def test_packed_chunked_loss_and_gradients_are_those_of_dense_float64(
    monkeypatch: pytest.MonkeyPatch, beta: float, max_tokens: int, chunk: int, entropy_coef: float
) -> None:
    monkeypatch.setattr("rft_platform.training.loop.distillation._ELEMENTS", chunk)
    student, teacher = build(23, 32, 0), build(23, 40, 1)
    plain = build(23, 32, 0).double()
    want = dense_loss(plain, build(23, 40, 1).double(), samples(), beta, entropy_coef)
    want.backward()
    metrics = accumulate_gradients(
        PackedPolicy(student), samples()[::-1], gkd(beta, entropy_coef=entropy_coef),
        max_tokens_per_pack=max_tokens, teacher=PackedPolicy(teacher),
    )  # fmt: skip
    assert metrics["loss"] == pytest.approx(want.item(), abs=1e-5)
    if not entropy_coef:
        assert metrics["divergence"] == pytest.approx(want.item(), abs=1e-5)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    for (name, got), parameter in zip(student.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.double(), parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path, tiny_model: Path) -> None:
    student, teacher = (PackedPolicy(build(size, 32, 0)) for size in (23, 29))
    with pytest.raises(UserError, match=r"student's vocabulary has 23 tokens, the teacher's 29"):
        accumulate_gradients(student, samples(), gkd(0.5), max_tokens_per_pack=100, teacher=teacher)
    build(23, 32, 0).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match=r"vocabulary has 23 tokens, the teacher's 512"):
        check_vocabulary(tmp_path / "small", tiny_model)
    check_vocabulary(tiny_model, tiny_model)


def test_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    from rft_platform.common.files import read_json, write_json

    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    content = read_json(tiny_model / "tokenizer.json")
    names = list(content["model"]["vocab"])
    vocabulary = content["model"]["vocab"]
    vocabulary[names[-1]], vocabulary[names[-2]] = vocabulary[names[-2]], vocabulary[names[-1]]
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(UserError, match="differ in 2 tokens"):
        check_vocabulary(tiny_model, tmp_path)
    content = read_json(tiny_model / "tokenizer.json")
    content["model"]["vocab"]["one_more"] = len(names)
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(UserError, match=r"differ in 1 tokens \(one_more\)"):
        check_vocabulary(tiny_model, tmp_path)


@pytest.mark.parametrize("beta", [-0.1, 1.5])
def test_a_beta_that_is_no_share_is_refused(beta: float) -> None:
    policy = PackedPolicy(build(23, 32, 0))
    with pytest.raises(UserError, match="argument 'beta' of policy loss 'gkd'"):
        accumulate_gradients(policy, samples(), gkd(beta), max_tokens_per_pack=100, teacher=policy)


@pytest.fixture(scope="module")
def teacher(ranks: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that knows the answers."""
    folder = tmp_path_factory.mktemp("teacher")
    columns = {"prompt": [prompt for prompt, _ in PAIRS], "response": [answer for _, answer in PAIRS]}
    pq.write_table(pa.table(columns), folder / "answers.parquet")
    request = TrainRequest(
        parent=str(tiny_model), parent_version=0, output=str(folder), algorithm=AlgorithmSpec(policy_loss="sft"),
        optimizer=OptimizerSpec(lr=5e-3), demonstrations=str(folder / "answers.parquet"), max_steps=20,
        train_batch_size=len(PAIRS),
    )  # fmt: skip
    result, events = train(TrainingSession(ranks, "float32"), request)
    assert events[-1].metrics["loss"] < 1.0
    return str(result.checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "dtype"), [(0.0, "float32"), (1.0, "float32"), (0.5, "bfloat16")]
)  # bfloat16 is sharded by FSDP2 even on one rank
def test_a_student_learns_from_a_teacher(
    ranks: Any, sft_request: Callable[..., TrainRequest], teacher: str, beta: float, dtype: str
) -> None:
    request = sft_request(PAIRS, algorithm=gkd(beta), teacher=teacher, max_steps=12, optimizer=OptimizerSpec(lr=5e-3))
    _, events = train(TrainingSession(ranks, dtype), request)
    first, last = (event.metrics["divergence"] for event in (events[0], events[-1]))
    assert last < first / 2


def test_rollouts_are_distilled_whatever_their_reward(
    session: TrainingSession, round_request: Callable[..., TrainRequest], teacher: str
) -> None:
    def flatten(rows: list[Any], judged: list[Any]) -> None:
        for judgement in judged:
            judgement.advantage = 0.0

    request = round_request(
        edit=flatten, algorithm=gkd(0.5), teacher=teacher, optimizer=OptimizerSpec(lr=3e-3), epochs=3
    )
    result, events = train(session, request)
    assert result.steps == 9
    assert events[-1].metrics["divergence"] < events[0].metrics["divergence"]


def test_a_teacher_gives_log_probs_to_a_token_advantage(
    session: TrainingSession, round_request: Callable[..., TrainRequest], teacher: str
) -> None:
    algorithm = AlgorithmSpec(token_advantage="on_policy_distill")
    request = round_request(algorithm=algorithm, teacher=teacher, optimizer=OptimizerSpec(lr=3e-3))
    result, events = train(session, request)
    assert result.steps == 3
    assert all(np.isfinite(event.metrics["grad_norm"]) and event.metrics["grad_norm"] > 0 for event in events)


def test_a_loss_that_distils_needs_a_teacher(
    session: TrainingSession, sft_request: Callable[..., TrainRequest]
) -> None:
    with pytest.raises(UserError, match="'gkd' needs a teacher"):
        train(session, sft_request(PAIRS, algorithm=gkd(0.5)))
