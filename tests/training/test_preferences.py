"""Preference pairs: how they are read, kept together, and trained by DPO with and without an adapter."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rft_platform.algorithms.spec import AlgorithmSpec, LoraSpec, OptimizerSpec
from rft_platform.common.errors import TrainingCancelled, UserError
from rft_platform.training.data.offline_data import answer_sample, read_preferences
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop import precompute
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.protocol import StepEvent, TrainRequest
from tests.support.builders import messages, preferences_file, train

ROWS = [(f"{a}+{b}=?", str(a + b), str(a + b + 1)) for a, b in [(1, 2), (30, 4), (55, 6), (7, 80), (9, 9), (12, 1)]]
DPO = AlgorithmSpec(policy_loss="dpo", loss_agg_mode="seq-mean-token-sum")


def write(file: Path, **columns: list[Any]) -> str:
    pq.write_table(pa.table(columns), file)
    return str(file)


def pairs_file(folder: Path, rows: list[tuple[str, str, str]] = ROWS) -> str:
    return preferences_file(folder / "pairs.parquet", rows)


@pytest.fixture
def dpo_request(tiny_model: Path, tmp_path: Path) -> Callable[..., TrainRequest]:
    def make(rows: list[tuple[str, str, str]] = ROWS, **fields: Any) -> TrainRequest:
        settings: dict[str, Any] = {
            "parent": str(tiny_model), "parent_version": 0, "output": str(tmp_path / "checkpoints"), "algorithm": DPO,
            "optimizer": OptimizerSpec(lr=1e-3), "preferences": pairs_file(tmp_path, rows), "train_batch_size": 3,
            "reference": str(tiny_model), "max_steps": 1,
        }  # fmt: skip
        return TrainRequest(**(settings | fields))

    return make


def ids(samples: list[Sample]) -> list[tuple[list[int], list[bool]]]:
    return [(s.token_ids.tolist(), s.loss_mask.tolist()) for s in samples]


def test_pairs_are_groups_that_share_the_tokens_of_their_prompt(tiny_model: Path, tmp_path: Path) -> None:
    rows = read_preferences(pairs_file(tmp_path), tiny_model)
    assert rows.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [s.advantage for s in rows.samples] == [1.0, -1.0] * 6
    assert [s.row_id for s in rows.samples[:3]] == ["0:chosen", "0:rejected", "1:chosen"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompt = [{"role": "user", "content": "30+4=?"}]
    for sample, answer in zip(rows.samples[2:4], ("34", "35"), strict=True):
        shown = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        ended = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        assert sample.token_ids.tolist() == shown + ended
        assert sample.token_ids[sample.loss_mask].tolist() == ended


def test_earlier_messages_and_tools_are_part_of_the_prompt(tiny_model: Path, tmp_path: Path) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "plus", "description": "adds", "parameters": {}}}])
    said = [{"role": role, "content": text} for role, text in [("system", "Be brief."), ("user", "1+1=?")]]
    answers = [[*said, {"role": "assistant", "content": text}] for text in ("2", "3")]
    chosen, rejected = ([json.dumps(answer[2:])] for answer in answers)
    file = write(tmp_path / "f", prompt=[json.dumps(said)], chosen=chosen, rejected=rejected, tools=[tools])
    rows = read_preferences(file, tiny_model)
    text = AutoTokenizer.from_pretrained(tiny_model).decode(rows.samples[1].token_ids)
    assert "Be brief." in text and "plus" in text and "1+1=?" in text
    calls = [{"role": "assistant", "content": "wait"}, {"role": "user", "content": "go on"}]
    longer = [[json.dumps([*calls, *answer[2:]])] for answer in answers]
    file = write(tmp_path / "f", prompt=[json.dumps(said)], chosen=longer[0], rejected=longer[1])
    good, bad = read_preferences(file, tiny_model).samples
    assert good.loss_mask.sum() == bad.loss_mask.sum() == 2  # only the last message is trained
    assert (good.token_ids[~good.loss_mask] == bad.token_ids[~bad.loss_mask]).all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"prompt": ["a"], "chosen": ["b"]},
            r"1 rows with the columns \['chosen', 'prompt'\]; expected rows with prompt",
        ),
        ({"prompt": pa.array([], pa.string()), "chosen": [], "rejected": []}, "0 rows with the columns"),
    ],
)
def test_what_is_no_pair_is_refused(tiny_model: Path, tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_preferences(write(tmp_path / "f", **columns), tiny_model)


def sequence_logps(model: Any, samples: list[Sample]) -> torch.Tensor:
    """Sum of the trainable tokens' log-probs of each row, by one plain forward each."""
    sums = []
    for sample in samples:
        tokens = torch.from_numpy(sample.token_ids).long()
        where = torch.from_numpy(np.flatnonzero(sample.loss_mask))
        log_softmax = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        sums.append(log_softmax[where - 1, tokens[where]].sum())
    return torch.stack(sums)


def odds(p: torch.Tensor) -> torch.Tensor:
    return p / (1 - p)


#: Losses of pairs from the papers' formulas, with the platform's defaults. ``x`` and ``ref`` are sums of log-probs
#: [pairs, 2], chosen first, and ``n`` the numbers of tokens.
FORMULAS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dpo": lambda x, ref, n: -torch.sigmoid(0.1 * ((x - ref)[:, 0] - (x - ref)[:, 1])).log(),
    "ipo": lambda x, ref, n: ((x - ref)[:, 0] - (x - ref)[:, 1] - 5.0) ** 2,
    "hinge": lambda x, ref, n: (1 - 0.1 * ((x - ref)[:, 0] - (x - ref)[:, 1])).clamp(min=0),
    "simpo": lambda x, ref, n: -torch.sigmoid(2 * (x / n)[:, 0] - 2 * (x / n)[:, 1] - 1).log(),
    "orpo": lambda x, ref, n: (
        -(x / n)[:, 0]
        - 0.1 * torch.sigmoid((odds((x / n).exp())[:, 0] / odds((x / n).exp())[:, 1]).log()).log()
    ),
}  # fmt: skip


def kto_formula(x: torch.Tensor, ref: torch.Tensor, z: float) -> torch.Tensor:
    """KTO with beta 0.1 and the default weights; ``z`` is the estimate of the KL from mismatched rows."""
    good, bad = torch.sigmoid(0.1 * ((x - ref)[:, 0] - z)), torch.sigmoid(0.1 * (z - (x - ref)[:, 1]))
    return torch.cat([1 - good, 1 - bad])


def with_answers_of_the_next_pair(samples: list[Sample]) -> list[Sample]:
    """Each row's prompt with the answer of the same side of the next pair."""
    mismatched = []
    for index, sample in enumerate(samples):
        other = samples[(index + 2) % len(samples)]
        answer = other.token_ids[other.loss_mask].tolist()
        prompt = sample.token_ids[~sample.loss_mask].tolist()
        mismatched.append(answer_sample(sample.row_id, prompt, answer))
    return mismatched


def labelled_file(folder: Path) -> str:
    """Answers without a partner, two of them to the same prompt."""
    prompts, completions = ["1+2=?", "1+2=?", "30+4=?", "55+6=?", "9+9=?"], ["3", "4", "34", "60", "18"]
    labels = ["true", "false", "true", "false", "true"]  # JSON, as the platform writes its datasets
    cells = {"prompt": messages("user", prompts), "completion": messages("assistant", completions)}
    return write(folder / "labels.parquet", **cells, label=labels)


@pytest.mark.slow
def test_kto_of_rows_without_a_partner_is_that_of_the_paper(
    session: TrainingSession, dpo_request: Callable[..., TrainRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = train(session, dpo_request(max_steps=2))  # policy and reference differ from here on
    gradients: dict[str, torch.Tensor] = {}

    def catch(optimizer: Any, spec: Any, step: int) -> float:
        assert session.state is not None
        named = session.state.policy.model.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        optimizer.zero_grad()
        return 0.0

    monkeypatch.setattr("rft_platform.training.loop.optimizer_step.apply_step", catch)
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    request = dpo_request(
        parent=first.checkpoint, parent_version=2, train_batch_size=5, output=str(tmp_path / "next"),
        optimizer=OptimizerSpec(clip_grad=1e9), max_tokens_per_pack=40, preferences=labelled_file(tmp_path),
        algorithm=AlgorithmSpec(policy_loss="kto", policy_loss_args=weights, loss_agg_mode="seq-mean-token-sum"),
    )  # fmt: skip
    _, events = train(session, request)
    samples = read_preferences(str(request.preferences), Path(first.checkpoint)).samples
    load = {"dtype": torch.float64, "local_files_only": True}
    model, start = (
        AutoModelForCausalLM.from_pretrained(folder, **load)
        for folder in (Path(first.checkpoint), Path(str(request.reference)))
    )
    others = [  # the next answer to another prompt
        answer_sample("", samples[row].token_ids[~samples[row].loss_mask].tolist(),
                      samples[other].token_ids[samples[other].loss_mask].tolist())
        for row, other in enumerate((2, 2, 3, 4, 0))
    ]  # fmt: skip
    with torch.no_grad():
        ref = sequence_logps(start, samples)
        z = max(0.0, float((sequence_logps(model, others) - sequence_logps(start, others)).mean()))
    r, sign = sequence_logps(model, samples) - ref, torch.tensor([1.0, -1, 1, -1, 1])
    loss = (torch.where(sign > 0, 1.5, 0.5) * (1 - torch.sigmoid(0.1 * sign * (r - z)))).mean()
    loss.backward()
    metrics = events[0].metrics
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    assert metrics["kl_baseline"] == pytest.approx(z, rel=1e-4, abs=1e-6)
    for name, kind in (("chosen", sign > 0), ("rejected", sign < 0)):
        assert metrics[f"pair_reward_{name}"] == pytest.approx(0.1 * r[kind].mean().item(), rel=1e-3, abs=1e-5)
    assert metrics["pair_accuracy"] == pytest.approx(float((sign * r > 0).double().mean()))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].double(), parameter.grad, atol=1e-5, rtol=1e-3)


def test_rows_without_a_partner_are_refused_by_losses_that_compare_pairs(
    session: TrainingSession, dpo_request: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="rows with a label have no partner, and the loss 'dpo'"):
        train(session, dpo_request(preferences=labelled_file(tmp_path)))


def paper_step(name: str, folder: Path, reference: Path, samples: list[Sample]) -> tuple[float, Any]:
    """Loss, and model with its gradients, in float64, straight from the paper's formula."""
    load = {"dtype": torch.float64, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(folder, **load)
    start = AutoModelForCausalLM.from_pretrained(reference, **load)
    others = with_answers_of_the_next_pair(samples)
    with torch.no_grad():
        ref = sequence_logps(start, samples)
        z = max(0.0, float((sequence_logps(model, others) - sequence_logps(start, others)).mean()))
    n = torch.tensor([sample.loss_mask.sum() for sample in samples])
    x, ref, n = (values.unflatten(0, (-1, 2)) for values in (sequence_logps(model, samples), ref, n))
    loss = (kto_formula(x, ref, z) if name == "kto" else FORMULAS[name](x, ref, n)).mean()
    loss.backward()
    return loss.item(), model


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FORMULAS, "kto"])
def test_loss_and_gradients_are_those_of_the_paper(
    session: TrainingSession, dpo_request: Callable[..., TrainRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:  # fmt: skip
    first, _ = train(session, dpo_request(max_steps=2))  # policy and reference differ from here on
    gradients: dict[str, torch.Tensor] = {}

    def catch(optimizer: Any, spec: Any, step: int) -> float:
        assert session.state is not None
        named = session.state.policy.model.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        optimizer.zero_grad()
        return 0.0

    monkeypatch.setattr("rft_platform.training.loop.optimizer_step.apply_step", catch)
    request = dpo_request(
        parent=first.checkpoint, parent_version=2, train_batch_size=6, output=str(tmp_path / "next"),
        optimizer=OptimizerSpec(clip_grad=1e9), max_tokens_per_pack=40,
        algorithm=AlgorithmSpec(policy_loss=name, loss_agg_mode="seq-mean-token-sum"),
    )  # fmt: skip
    _, events = train(session, request)
    rows = read_preferences(str(request.preferences), Path(first.checkpoint))
    want, model = paper_step(name, Path(first.checkpoint), Path(str(request.reference)), rows.samples)
    assert events[0].metrics["loss"] == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert events[0].metrics["packs"] > 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].double(), parameter.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_kto_has_the_same_baseline_in_packs_of_any_size_and_resumes_equal(
    session: TrainingSession, dpo_request: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    kto = AlgorithmSpec(policy_loss="kto", loss_agg_mode="seq-mean-token-sum")
    baselines = []
    for size in (40, 4096):
        request = dpo_request(algorithm=kto, max_steps=3, max_tokens_per_pack=size, output=str(tmp_path / str(size)))
        result, events = train(session, request)
        baselines.append([event.metrics["kl_baseline"] for event in events])
    assert baselines[0] == pytest.approx(baselines[1], rel=1e-4, abs=1e-6)
    assert baselines[0][0] == 0 and max(baselines[0]) > 0  # the policy starts as its reference
    half, _ = train(session, dpo_request(algorithm=kto, max_steps=1, output=str(tmp_path / "half")))
    rest, _ = train(
        session,
        dpo_request(
            algorithm=kto, parent=half.checkpoint, parent_version=1, max_steps=2, output=str(tmp_path / "half")
        ),
    )
    assert rest.weights_digest == result.weights_digest


@pytest.mark.slow
def test_kto_needs_two_prompts(session: TrainingSession, dpo_request: Callable[..., TrainRequest]) -> None:
    kto = AlgorithmSpec(policy_loss="kto", loss_agg_mode="seq-mean-token-sum")
    with pytest.raises(UserError, match="all prompts are equal"):
        train(session, dpo_request(ROWS[:1], algorithm=kto, train_batch_size=1))


@pytest.mark.slow
def test_dpo_raises_the_margin_of_preferred_answers(
    session: TrainingSession, dpo_request: Callable[..., TrainRequest], tiny_model: Path
) -> None:
    result, events = train(session, dpo_request(train_batch_size=6, max_steps=25))
    assert events[0].metrics["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert events[-1].metrics["loss"] < 0.2
    rows = read_preferences(pairs_file(Path(result.checkpoint).parent), tiny_model)
    after, before = (
        sequence_logps(AutoModelForCausalLM.from_pretrained(folder), rows.samples).unflatten(0, (-1, 2))
        for folder in (result.checkpoint, tiny_model)
    )
    moved = (after - before).detach()
    assert (moved[:, 0] > moved[:, 1]).all()


@pytest.mark.slow
def test_the_stream_of_pairs_continues_after_the_parent(
    session: TrainingSession, dpo_request: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    straight, _ = train(session, dpo_request(max_steps=4))
    half, _ = train(session, dpo_request(max_steps=2, output=str(tmp_path / "half")))
    assert session.state is not None
    rest, _ = train(
        session,
        dpo_request(parent=half.checkpoint, parent_version=2, max_steps=2, output=str(tmp_path / "half")),
    )
    assert rest.weights_digest == straight.weights_digest


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "adapter"])
def test_a_training_that_was_cut_off_ends_equal(
    session: TrainingSession,
    dpo_request: Callable[..., TrainRequest],
    ranks: Any,
    tmp_path: Path,
    lora: LoraSpec | None,
) -> None:
    request = dpo_request(max_steps=4, save_interval=1, lora=lora)
    straight, _ = train(session, replace(request, output=str(tmp_path / "straight")))
    done: list[StepEvent] = []
    with pytest.raises(TrainingCancelled):
        session.train(request, done.append, lambda: len(done) == 3)
    resumed, events = train(TrainingSession(ranks, "float32"), request)
    assert resumed.weights_digest == straight.weights_digest
    assert events[:3] == done


class Counter:
    """Rows that were scored for a reference."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        score = precompute.score

        def counted(policy: Any, samples: list[Sample], **options: Any) -> list[np.ndarray]:
            self.rows.append(len(samples))
            return score(policy, samples, **options)

        monkeypatch.setattr(precompute, "score", counted)


@pytest.mark.slow
def test_reference_log_probs_are_computed_once(
    session: TrainingSession, dpo_request: Callable[..., TrainRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter(monkeypatch)
    loaded: list[Path] = []
    load = precompute.FrozenModel.model
    monkeypatch.setattr(
        precompute.FrozenModel, "model", lambda self, folder: loaded.append(folder) or load(self, folder)
    )
    first, _ = train(session, dpo_request(max_steps=None, epochs=3))
    following = dpo_request(parent=first.checkpoint, parent_version=6, output=str(tmp_path / "next"), max_steps=3)
    train(session, following)
    assert counter.rows == [12]
    assert loaded == []  # the reference is what the policy starts from, and later nothing is missing
    moved = replace(following, reference=first.checkpoint, output=str(tmp_path / "moved"))
    train(session, moved)
    assert counter.rows == [12, 12]
    third = replace(moved, reference=following.reference, output=str(tmp_path / "third"))
    train(session, third)
    assert counter.rows == [12, 12, 12]
    assert loaded == [Path(str(following.reference))]


@pytest.mark.slow
def test_only_blocks_that_are_needed_are_scored_and_to_the_same_bits(
    ranks: Any, dpo_request: Callable[..., TrainRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "BLOCK", 2)
    counter = Counter(monkeypatch)
    session, request = TrainingSession(ranks, "float32"), dpo_request(train_batch_size=2)
    first, _ = train(session, request)
    assert counter.rows == [4]
    following = replace(request, parent=first.checkpoint, parent_version=1, max_steps=2)
    warm, _ = train(session, following)
    assert counter.rows == [4, 4, 4]
    cold, _ = train(TrainingSession(ranks, "float32"), replace(following, output=str(tmp_path / "cold")))
    assert cold.weights_digest == warm.weights_digest


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # bfloat16 is sharded by FSDP2 even on one rank
def test_with_an_adapter_the_reference_is_the_model_under_it(
    ranks: Any, dpo_request: Callable[..., TrainRequest], dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a second model was loaded")

    monkeypatch.setattr(precompute.FrozenModel, "model", refuse)
    session = TrainingSession(ranks, dtype)
    request = dpo_request(lora=LoraSpec(rank=4), max_steps=3, train_batch_size=6, optimizer=OptimizerSpec(lr=1e-2))
    first, events = train(session, request)
    assert events[0].metrics["loss"] == pytest.approx(np.log(2), abs=2e-2 if dtype == "bfloat16" else 1e-5)
    assert all(event.metrics["grad_norm"] > 0.01 for event in events)
    assert events[-1].metrics["loss"] < events[0].metrics["loss"] - 0.05
    # From a checkpoint with a trained adapter, in a new session, without a name for the reference: still the base.
    again = replace(
        request, parent=first.checkpoint, parent_version=3, reference=None, output=str(tmp_path / "again"), max_steps=1
    )
    _, later = train(TrainingSession(ranks, dtype), again)
    assert later[0].metrics["loss"] < events[0].metrics["loss"] - 0.05


def test_what_does_not_fit_pairs_is_refused(session: TrainingSession, dpo_request: Callable[..., TrainRequest]) -> None:
    with pytest.raises(UserError, match="needs a reference model"):
        train(session, dpo_request(reference=None))
    with pytest.raises(UserError, match="'sft' does not compare the rows of a pair"):
        train(session, dpo_request(algorithm=AlgorithmSpec(policy_loss="sft")))
    with pytest.raises(UserError, match="takes one of rollouts"):
        train(session, dpo_request(demonstrations="some.parquet"))
