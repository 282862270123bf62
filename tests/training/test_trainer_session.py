"""The state machine: what is trained, published, reused, refused and rolled back."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rft_platform.algorithms.losses.registry import LOSSES, TokenBatch, TokenLoss, loss
from rft_platform.algorithms.spec import AlgorithmSpec, LoraSpec, OptimizerSpec
from rft_platform.common.errors import NonFiniteError, StorageError, TrainerError, TrainingCancelled, UserError
from rft_platform.common.files import read_json
from rft_platform.config.model_shape import ModelShape
from rft_platform.training.loop.plan import group_steps
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.protocol import StepEvent, TrainRequest, TrainResult

PAIRS = [(f"{a}+{b}=?", str(a + b)) for a, b in [(1, 2), (30, 4), (55, 6), (7, 80)]]


def train(session: TrainingSession, request: TrainRequest, events: list[StepEvent] | None = None) -> TrainResult:
    return session.train(request, (events if events is not None else []).append, lambda: False)


def weights(folder: str) -> dict[str, np.ndarray]:
    return load_file(Path(folder) / "model.safetensors")


def moments(folder: str) -> dict[str, np.ndarray]:
    return load_file(Path(folder) / "trainer_state" / "optimizer.safetensors")


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def after(request: TrainRequest, result: TrainResult, **changes) -> TrainRequest:
    """The same request, starting where ``result`` ended."""
    return replace(request, parent=result.checkpoint, parent_version=result.policy_version, **changes)


def test_a_round_is_trained_measured_and_published(session, round_request, tiny_model) -> None:
    request = round_request(lineage={"round": 1}, optimizer=OptimizerSpec(lr=1e-3, lr_warmup_steps=2))
    events: list[StepEvent] = []
    result = train(session, request, events)
    assert (result.steps, result.policy_version, result.reused) == (3, 3, False)
    assert Path(result.checkpoint).name == "global_step_3"
    assert [event.step for event in events] == [1, 2, 3]
    assert [event.metrics["lr"] for event in events] == [5e-4, 1e-3, 1e-3]
    assert [event.metrics["staleness_mean"] for event in events] == [0, 1, 2]
    assert events[0].metrics["reward_mean"] == 0.5
    for name in ("loss", "grad_norm", "entropy", "mismatch_k3", "tokens_per_s", "cpu_seconds", "peak_rss_mb"):
        assert math.isfinite(events[0].metrics[name])
    assert sum(event.metrics["rows"] for event in events) == 48
    assert {"load", "data", "forward_backward", "optimizer", "save"} <= result.seconds.keys()
    assert not equal(weights(result.checkpoint), weights(str(tiny_model)))
    manifest = read_json(Path(result.checkpoint) / "manifest.json")
    assert (manifest["policy_version"], manifest["parent"], manifest["parent_version"]) == (3, str(tiny_model), 0)
    assert manifest["lineage"] == {"round": 1}
    assert manifest["weights_digest"] == result.weights_digest
    assert read_json(Path(result.checkpoint) / "steps.json")[0]["metrics"]["loss"] == events[0].metrics["loss"]


@pytest.mark.slow
def test_same_seed_same_weights_and_another_seed_others(session, ranks, round_request, tmp_path) -> None:
    request = round_request()
    first = train(session, request)
    again = train(TrainingSession(ranks, "float32"), replace(request, output=str(tmp_path / "again")))
    other = train(session, replace(request, output=str(tmp_path / "other"), seed=8))
    assert again.weights_digest == first.weights_digest != other.weights_digest


@pytest.mark.slow
def test_a_resumed_training_equals_an_undisturbed_one(session, ranks, round_request, tmp_path) -> None:
    request = round_request(seed=1)
    following = round_request(seed=2)
    middle = train(session, request)
    straight = train(session, after(following, middle))  # the state is still held
    resumed = train(
        TrainingSession(ranks, "float32"), after(following, middle, output=str(tmp_path / "resumed"))
    )  # read from disk
    assert resumed.weights_digest == straight.weights_digest
    assert equal(moments(resumed.checkpoint), moments(straight.checkpoint))
    assert float(moments(resumed.checkpoint)["model.norm.weight.step"]) == 6
    cold = train(session, after(following, middle, output=str(tmp_path / "cold"), fresh_optimizer=True))
    assert cold.weights_digest != straight.weights_digest
    assert float(moments(cold.checkpoint)["model.norm.weight.step"]) == 3


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_score_between_two_trainings_changes_nothing(ranks, round_request, tmp_path, dtype) -> None:
    """In bfloat16 FSDP gathers parameters; an optimizer made after a forward pass must still update the shards."""
    session = TrainingSession(ranks, dtype)
    first = train(session, round_request(output=str(tmp_path / "first")))
    session.score([[5, 6, 7, 8]])
    following = {"seed": 1, "parent": first.checkpoint, "parent_version": first.policy_version}
    held = train(session, round_request(**following, output=str(tmp_path / "held")))
    loaded = train(TrainingSession(ranks, dtype), round_request(**following, output=str(tmp_path / "loaded")))
    assert first.weights_digest != held.weights_digest == loaded.weights_digest


def test_an_identical_request_is_answered_from_the_store(session, ranks, round_request) -> None:
    request, events = round_request(), list[StepEvent]()
    first = train(session, request, events)
    scores = session.score([[1, 7, 2]])
    other, replayed = TrainingSession(ranks, "float32"), list[StepEvent]()
    again = train(other, replace(request, lineage={"run": "another"}), replayed)
    assert again.reused
    assert (again.checkpoint, again.weights_digest, again.steps) == (first.checkpoint, first.weights_digest, 3)
    assert replayed == events
    assert other.score([[1, 7, 2]]) == scores  # and the published weights are held


@pytest.mark.slow
def test_a_reused_result_is_held_with_its_moments(session, ranks, round_request, tmp_path) -> None:
    first = train(session, round_request(fresh_optimizer=True))
    following = after(round_request(seed=2), first)
    straight = train(session, following)
    other = TrainingSession(ranks, "float32")
    assert train(other, round_request(fresh_optimizer=True)).reused
    assert other.state is not None and other.state.policy_version == 3
    again = train(other, replace(following, output=str(tmp_path / "again")))
    assert again.weights_digest == straight.weights_digest


@pytest.mark.slow
def test_different_rows_under_the_same_name_are_trained(session, round_request) -> None:
    first = train(session, round_request())
    changed = round_request(edit=lambda rows, judged: [setattr(j, "advantage", -j.advantage) for j in judged])
    again = train(session, changed)
    assert not again.reused
    assert again.checkpoint == first.checkpoint
    assert again.weights_digest != first.weights_digest


def test_no_gradient_anywhere_is_a_recorded_no_op(session, round_request, tiny_model, tmp_path) -> None:
    request = round_request(edit=lambda rows, judged: [setattr(j, "advantage", 0.0) for j in judged])
    result = train(session, request)
    assert (result.steps, result.policy_version, result.checkpoint) == (0, 0, str(tiny_model))
    assert result.metrics["rows"] == 48
    assert not (tmp_path / "checkpoints").exists()
    assert len(session.score([[1, 2]])[0]) == 2


def test_steps_without_a_gradient_are_left_out(session, round_request) -> None:
    def flatten(rows, judged) -> None:
        for judgement in judged[4:]:
            judgement.advantage = 0.0

    assert train(session, round_request(edit=flatten)).steps == 1


def test_a_users_loss_keeps_steps_without_an_advantage(session, round_request) -> None:
    @loss("regularised")
    def squared(tokens: TokenBatch) -> TokenLoss:
        return TokenLoss((tokens.advantage - (tokens.logp - tokens.rollout_logprobs)).square() / 2)

    try:
        flat = round_request(
            algorithm=AlgorithmSpec(policy_loss="regularised"),
            edit=lambda rows, judged: [setattr(j, "advantage", 0.0) for j in judged],
        )
        events: list[StepEvent] = []
        assert train(session, flat, events).steps == 3
        assert all(event.metrics["grad_norm"] > 0 for event in events)
    finally:
        LOSSES.forget(__name__)


def test_a_step_without_an_advantage_changes_neither_weights_nor_momentum_nor_schedule(
    session, round_request, tmp_path
) -> None:
    optimizer = OptimizerSpec(lr=1e-3, lr_scheduler_type="linear", total_steps=4, weight_decay=0.5)
    _, flat, last = group_steps(np.repeat(np.arange(12), 4), 16, seed=7, epochs=1)

    def flatten(*steps: np.ndarray):
        return lambda rows, judged: [setattr(judged[row], "advantage", 0.0) for row in np.concatenate(steps)]

    events: list[StepEvent] = []
    result = train(session, round_request(optimizer=optimizer, edit=flatten(flat)), events)
    assert (result.steps, result.policy_version) == (2, 2)
    assert [event.metrics["lr"] for event in events] == pytest.approx([1e-3, 0.75e-3]), "no step of the schedule passed"
    outputs = [str(tmp_path / name) for name in ("left_out", "ended")]
    left_out = train(session, round_request(optimizer=optimizer, edit=flatten(flat, last), output=outputs[0]))
    ended = train(session, round_request(optimizer=optimizer, max_steps=1, output=outputs[1]))
    assert left_out.steps == ended.steps == 1
    assert equal(weights(left_out.checkpoint), weights(ended.checkpoint)), "weight decay stood still too"
    assert equal(moments(left_out.checkpoint), moments(ended.checkpoint))


@pytest.mark.slow
def test_max_steps_and_epochs(session, round_request, tmp_path) -> None:
    assert train(session, round_request(max_steps=2)).policy_version == 2
    assert train(session, round_request(epochs=2, output=str(tmp_path / "two"))).policy_version == 6


@pytest.mark.slow
def test_cancelling_rolls_back_to_the_parent(session, round_request, tmp_path) -> None:
    request = round_request()
    parent = train(session, request)
    before = session.score([[5, 6, 7]])
    answers = iter([False, True])
    with pytest.raises(TrainingCancelled, match="before step 2 of 3"):
        session.train(after(round_request(seed=2), parent), lambda event: None, lambda: next(answers))
    assert session.score([[5, 6, 7]]) == before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_3"]


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_refused_and_names_rows(session, round_request) -> None:
    request = round_request()
    with pytest.raises(NonFiniteError, match=r"step 2 was refused: loss .*, gradient norm nan; .*: \w{32}, "):
        train(session, replace(request, optimizer=OptimizerSpec(lr=1e30)))
    assert np.isfinite(session.score([[5, 6, 7]])).all()
    assert train(session, request).steps == 3


@pytest.mark.slow
def test_imitation_learns_a_tiny_set(session, sft_request) -> None:
    events: list[StepEvent] = []
    result = train(session, sft_request(PAIRS, max_steps=40), events)
    assert events[0].metrics["loss"] > 5
    assert events[-1].metrics["loss"] < 0.1
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    for prompt, answer in PAIRS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(out) == f"{answer}<|im_end|>"


@pytest.mark.slow
def test_imitation_continues_after_the_parent(session, sft_request, tmp_path) -> None:
    request = sft_request(PAIRS, train_batch_size=3, max_steps=2)
    first = train(session, request)
    legs = train(session, after(request, first))
    straight = train(session, replace(request, max_steps=4, output=str(tmp_path / "straight")))
    assert legs.weights_digest == straight.weights_digest
    assert equal(moments(legs.checkpoint), moments(straight.checkpoint))
    again = train(session, after(request, first, data_position=0, output=str(tmp_path / "again")))
    assert again.weights_digest != legs.weights_digest


def test_the_checkpoint_is_a_plain_model_with_a_tied_head(session, round_request) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    result = train(session, round_request())
    assert "lm_head.weight" not in weights(result.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = [1, 40, 41, 42, 2]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    expected = torch.log_softmax(logits, -1)[torch.arange(4), torch.tensor(ids[1:])]
    assert session.score([ids])[0] == pytest.approx([0.0, *expected.tolist()], abs=1e-5)


@pytest.mark.slow
def test_lora_trains_and_resumes_the_adapter_alone(session, ranks, round_request, tiny_model, tmp_path) -> None:
    lora = LoraSpec(rank=4, alpha=8)
    request = round_request(lora=lora)
    first = train(session, request)
    folder = Path(first.checkpoint)
    assert not (folder / "model.safetensors").exists()
    adapter = load_file(folder / "adapter_model.safetensors")
    assert all("lora_" in name for name in adapter) and len(adapter) == 5 * 7 * 2
    shape = ModelShape.read(tiny_model)
    assert shape is not None and shape.adapter(lora) == sum(array.size for array in adapter.values())
    following = after(round_request(seed=2, lora=lora), first)
    straight = train(session, following)
    resumed = train(TrainingSession(ranks, "float32"), replace(following, output=str(tmp_path / "resumed")))
    assert resumed.weights_digest == straight.weights_digest
    with pytest.raises(UserError, match="holds a LoRA adapter"):
        train(session, replace(following, lora=LoraSpec(rank=8)))

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train(session, following)  # answered from the store: its weights are held again
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), straight.checkpoint)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[1, 40, 2]])).logits[0]
    expected = torch.log_softmax(logits, -1)[[0, 1], [40, 2]]
    assert session.score([[1, 40, 2]])[0] == pytest.approx([0.0, *expected.tolist()], abs=1e-5)


@pytest.mark.slow
def test_rounded_weights_are_published_and_full_ones_kept(ranks, round_request, tmp_path) -> None:
    from safetensors.torch import load_file as load_tensors

    def new_session() -> TrainingSession:
        return TrainingSession(ranks, "bfloat16")

    session = new_session()
    first = train(session, round_request(optimizer=OptimizerSpec(lr=1e-5)))
    published = load_tensors(Path(first.checkpoint) / "model.safetensors")
    master = load_tensors(Path(first.checkpoint) / "trainer_state" / "master.safetensors")
    assert {str(tensor.dtype) for tensor in published.values()} == {"torch.bfloat16"}
    assert read_json(Path(first.checkpoint) / "config.json")["dtype"] == "bfloat16"
    assert all((published[name] == tensor.bfloat16()).all() for name, tensor in master.items())
    assert any((published[name] != tensor).any() for name, tensor in master.items())
    following = after(round_request(seed=2), first)
    straight = train(session, following)
    resumed = train(new_session(), replace(following, output=str(tmp_path / "resumed")))
    assert resumed.weights_digest == straight.weights_digest


def test_a_damaged_parent_is_detected_by_its_digest(session, ranks, round_request) -> None:
    result = train(session, round_request())
    file = Path(result.checkpoint) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StorageError, match=r"is damaged: model.safetensors"):
        train(TrainingSession(ranks, "float32"), after(round_request(seed=2), result))
    (Path(result.checkpoint) / "trainer_state" / "optimizer.safetensors").unlink()
    with pytest.raises(StorageError, match=r"damaged|missing"):
        train(TrainingSession(ranks, "float32"), after(round_request(seed=2), result))


def test_a_damaged_result_is_made_again(session, ranks, round_request) -> None:
    request = round_request()
    first = train(session, request)
    (Path(first.checkpoint) / "model.safetensors").write_bytes(b"")
    again = train(TrainingSession(ranks, "float32"), request)
    assert not again.reused
    assert again.weights_digest == first.weights_digest


@pytest.mark.slow
def test_the_kl_to_a_reference_holds_the_policy_back(session, round_request, tiny_model, tmp_path) -> None:
    free = round_request(epochs=3)
    held = replace(free, algorithm=AlgorithmSpec(beta=5.0), reference=str(tiny_model), output=str(tmp_path / "held"))
    events: list[StepEvent] = []
    train(session, held, events)
    assert events[0].metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert events[-1].metrics["kl"] > 0
    near = weights(str(tmp_path / "held" / "global_step_9"))
    far, start = weights(train(session, free).checkpoint), weights(str(tiny_model))
    assert sum(np.abs(near[n] - start[n]).sum() for n in start) < sum(np.abs(far[n] - start[n]).sum() for n in start)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent": "/nowhere"}, "model folder /nowhere does not exist"),
        ({"rollouts": (), "judged": ()}, "takes one of rollouts with their judgements, demonstrations"),
        ({"algorithm": AlgorithmSpec(beta=0.1)}, "needs a reference model: set its folder"),
        ({"algorithm": AlgorithmSpec(policy_loss="pppo")}, "pppo"),
        ({"optimizer": OptimizerSpec(lr_scheduler_type="cosine")}, "total_steps"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_written(
    session, round_request, tmp_path, changes, message
) -> None:
    with pytest.raises(UserError, match=message):
        train(session, round_request(**changes))
    assert not (tmp_path / "checkpoints").exists()


def test_a_model_without_tokenizer_is_refused(session, round_request, tiny_model, tmp_path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(UserError, match="holds no tokenizer"):
        train(session, round_request(parent=str(bare)))


def test_scoring_without_weights_is_refused(session) -> None:
    with pytest.raises(TrainerError, match="holds no weights yet"):
        session.score([[1, 2]])
