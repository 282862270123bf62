"""Reading rows to train on: exact, complete, or an error that names the row."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_platform.algorithms.objective import Objective
from rft_platform.algorithms.spec import AlgorithmSpec, CriticSpec, OptimizerSpec
from rft_platform.common.errors import NonFiniteError, StorageError, UserError
from rft_platform.experience.selections import SELECTION_SCHEMA
from rft_platform.training.data.offline_data import read_demonstrations
from rft_platform.training.data.rollout_rows import read_rollouts
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.loop.plan import Planner
from rft_platform.training.packed.packed_policy import PackedPolicy


def read(request, policy_gradient: bool = True):
    return read_rollouts(request.rollouts, request.judged, policy_gradient=policy_gradient)


def test_samples_are_the_stored_rows(round_request) -> None:
    seen = []

    def edit(rows, judged) -> None:
        for number, row in enumerate(rows):
            row.call.temperature = (0.5, 1.0, 2.0)[number % 3]
        seen.extend(zip(rows, judged, strict=True))

    rows = read(round_request(edit=edit))
    assert len(rows.samples) == 48
    assert rows.group.tolist() == [g for g in range(12) for _ in range(4)]
    for sample, (row, judgement) in zip(rows.samples, seen, strict=True):
        prompt = len(row.prompt_ids)
        assert sample.row_id == row.row_id
        assert sample.token_ids.tolist() == [*row.prompt_ids, *row.response_ids]
        assert sample.loss_mask.tolist() == [False] * prompt + row.loss_mask
        np.testing.assert_allclose(sample.rollout_logprobs[prompt:], row.rollout_logprobs, rtol=1e-6)
        assert sample.advantage == judgement.advantage
        assert sample.temperature == row.call.temperature
    assert rows.facts["reward"].tolist() == [judgement.reward for _, judgement in seen]


def test_the_temperature_of_a_stored_row_divides_its_logits(round_request, tiny_model: Path) -> None:
    """The rows have the model's log-probs at their temperatures, so the loss finds no mismatch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)

    @torch.no_grad()
    def sample_at_temperatures(rows, judged) -> None:
        for number, row in enumerate(rows):
            row.call.temperature = (0.25, 1.0, 4.0)[number % 3]
            ids, prompt = torch.tensor([*row.prompt_ids, *row.response_ids]), len(row.prompt_ids)
            logp = (model(ids[None]).logits[0, prompt - 1 : -1] / row.call.temperature).log_softmax(-1)
            row.call.rollout_logprobs[:] = logp.gather(1, ids[prompt:, None])[:, 0].tolist()

    samples = read(round_request(groups=3, edit=sample_at_temperatures)).samples
    metrics = accumulate_gradients(PackedPolicy(model), samples, AlgorithmSpec(), max_tokens_per_pack=1024)
    assert metrics["rows"] == 12 and metrics["mismatch_abs"] < 1e-5


@pytest.mark.parametrize(
    ("repeated", "message"),
    [
        (("rollouts", "judged"), "the rollouts hold a row_id more than once"),
        (("rollouts",), "the rollouts hold a row_id more than once"),
        (("judged",), "the judgements hold a row_id more than once"),
    ],
)
def test_files_that_repeat_rows_are_refused(round_request, repeated: tuple[str, ...], message: str) -> None:
    request = round_request()
    files = {name: getattr(request, name) * (1 + (name in repeated)) for name in ("rollouts", "judged")}
    with pytest.raises(StorageError, match=message):
        read_rollouts(**files, policy_gradient=True)


def test_a_row_in_place_of_another_is_refused(round_request) -> None:
    """As many rows as judgements, and each row has one."""
    request = round_request()
    table = pq.read_table(request.rollouts[0])
    pq.write_table(table.take([0, *range(len(table) - 1)]), request.rollouts[0])
    with pytest.raises(StorageError, match="the rollouts hold a row_id more than once"):
        read(request)


def test_judgements_are_matched_by_row_id_not_by_order(round_request) -> None:
    ordered = read(round_request(seed=1))
    shuffled = read(round_request(seed=1, edit=lambda rows, judged: judged.reverse()))
    assert [s.advantage for s in shuffled.samples] == [s.advantage for s in ordered.samples]
    assert shuffled.digest != ordered.digest


def test_dropped_rows_are_left_out_and_counted(round_request) -> None:
    def drop(rows, judged) -> None:
        for judgement in judged[:4]:
            judgement.dropped_by = "too_long"

    rows = read(round_request(edit=drop))
    assert len(rows.samples) == 44
    assert rows.dropped == 4
    assert rows.group.max() == 10


def test_all_rows_dropped_is_no_error(round_request) -> None:
    def drop(rows, judged) -> None:
        for judgement in judged:
            judgement.dropped_by = "filter"

    rows = read(round_request(edit=drop))
    assert rows.samples == [] and rows.dropped == 48


def test_a_selection_takes_its_rows_and_no_others(round_request, tmp_path: Path) -> None:
    request = round_request(edit=lambda rows, judged: setattr(judged[5], "dropped_by", "too_long"))
    every = read(request)
    ids = [sample.row_id for sample in every.samples]
    dropped = (set(pq.read_table(request.rollouts[0])["row_id"].to_pylist()) - set(ids)).pop()
    use = ["replay", "fresh", "fresh", "filtered", "stale"]
    chosen = write_selection(tmp_path / "chosen.parquet", row_id=[ids[9], ids[2], ids[3], dropped, ids[20]], use=use)
    rows = read_rollouts(request.rollouts, request.judged, policy_gradient=True, selection=chosen)
    assert [sample.row_id for sample in rows.samples] == [ids[2], ids[3], ids[9]], "in the order of the files"
    assert rows.dropped == 1 and rows.facts["reward"].shape == (3,)
    assert rows.digest != every.digest, "another selection is another training"
    nothing = write_selection(tmp_path / "none.parquet", row_id=[ids[0]], use=["stale"])
    assert read_rollouts(request.rollouts, request.judged, policy_gradient=True, selection=nothing).samples == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (lambda ids: [ids[0], ids[0]], "contains a row_id more than once"),
        (lambda ids: ["gone"], "none of the files .gone"),
    ],
)
def test_a_selection_that_repeats_rows_or_names_others_is_refused(round_request, tmp_path, names, message) -> None:
    request = round_request()
    ids = names([sample.row_id for sample in read(request).samples])
    chosen = write_selection(tmp_path / "chosen.parquet", row_id=ids, use=["fresh"] * len(ids))
    with pytest.raises(StorageError, match=message):
        read_rollouts(request.rollouts, request.judged, policy_gradient=True, selection=chosen)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda rows, judged: judged.pop(), StorageError, "1 rollout rows have no judgement"),
        (lambda rows, judged: rows.pop(), StorageError, "1 judgements have no rollout row"),
        (
            lambda rows, judged: setattr(judged[0], "advantage", float("nan")),
            NonFiniteError,
            "1 rows have an advantage",
        ),
        (
            lambda rows, judged: rows[0].call.rollout_logprobs.__setitem__(0, float("-inf")),
            NonFiniteError,
            "not finite",
        ),
        (
            lambda rows, judged: [setattr(row.call, "top_p", 0.9) for row in rows],
            UserError,
            r"all 48 rows were sampled with .* top_p 0.9",
        ),
    ],
)
def test_rows_that_cannot_be_used(round_request, edit, error, message) -> None:
    with pytest.raises(error, match=message):
        read(round_request(edit=edit))


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 5), ("temperature", 0.0)])
def test_rows_with_other_sampling_are_masked_and_counted(round_request, name: str, value: float) -> None:
    """Their log-probs are not the policy's; their runs' rewards still count in their groups."""

    def edit(rows, judged) -> None:
        setattr(rows[3].call, name, value)
        judged[3].reward = 7.0

    request = round_request(edit=edit)
    rows = read(request)
    assert len(rows.samples) == 47 and rows.left_out()["rows_other_sampling"] == 1
    assert rows.dropped == 0 and len(np.unique(rows.group)) == 12
    assert {key: values.tolist() for key, values in rows.masked.items() if key != "step_reward"} == {
        "group": [0],
        "run": [47],
        "step": [0],
        "reward": [7.0],
    }
    imitated = read(request, policy_gradient=False)
    assert len(imitated.samples) == 48 and imitated.other_sampling == 0 == len(imitated.masked["run"])


def test_a_training_leaves_rows_with_other_sampling_out(session, round_request) -> None:
    request = round_request(edit=lambda rows, judged: setattr(rows[3].call, "temperature", 0.0))
    result = session.train(request, lambda event: None, lambda: False)
    assert result.steps > 0 and result.metrics["rows_other_sampling"] == 1


def test_rows_that_an_operator_masked_have_facts(round_request) -> None:
    def edit(rows, judged) -> None:
        for place in (1, 2, *range(8, 12)):  # the third group is masked as a whole
            judged[place].dropped_by, judged[place].masked = "truncated_mask", True
        judged[0].dropped_by = "std_filter"

    rows = read(round_request(edit=edit))
    assert len(rows.samples) == 41 and rows.dropped == 7
    assert rows.masked["group"].tolist() == [0, 0] and rows.masked["run"].tolist() == [41, 42]


def test_greedy_rows_may_be_imitated(round_request) -> None:
    rows = read(
        round_request(edit=lambda rows, judged: setattr(rows[3].call, "temperature", 0.0)), policy_gradient=False
    )
    assert rows.samples[3].temperature == 1.0


def test_the_error_names_a_missing_or_broken_file(round_request, tmp_path: Path) -> None:
    request = round_request()
    with pytest.raises(StorageError, match=r"gone\.parquet does not exist"):
        read_rollouts([str(tmp_path / "gone.parquet")], request.judged, policy_gradient=True)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(StorageError, match=r"broken\.parquet: cannot be read"):
        read_rollouts([str(broken)], request.judged, policy_gradient=True)


def write_selection(path: Path, **columns: list[str]) -> str:
    """A file of selected rows; a training reads the given columns only."""
    others = {name: [None] * len(columns["row_id"]) for name in SELECTION_SCHEMA.names if name not in columns}
    pq.write_table(pa.table({**columns, **others}).replace_schema_metadata(SELECTION_SCHEMA.metadata), path)
    return str(path)


def write(path: Path, **columns: list) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_demonstrations_train_the_answer_and_its_end_token(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    file = write(tmp_path / "d.parquet", prompt=["1+1=?", "2+3=?"], response=["2", "5"], system=[None, "Be brief."])
    rows = read_demonstrations(file, tiny_model)
    for sample, question, answer, system in zip(
        rows.samples, ["1+1=?", "2+3=?"], "25", [None, "Be brief."], strict=True
    ):
        messages = [{"role": "system", "content": system}] * (system is not None) + [
            {"role": "user", "content": question}
        ]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert sample.token_ids[~sample.loss_mask].tolist() == prompt
        assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == f"{answer}<|im_end|>"


def test_every_assistant_turn_is_a_sample_of_one_group(tiny_model: Path, tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 1 more?"}, {"role": "assistant", "content": "3"},
    ]  # fmt: skip
    rows = read_demonstrations(
        write(tmp_path / "d.parquet", messages=[json.dumps(talk), json.dumps(talk[:2])]), tiny_model
    )
    assert rows.group.tolist() == [0, 0, 1]
    first, second, _ = rows.samples
    assert (
        second.token_ids[: len(first.token_ids)].tolist() == first.token_ids.tolist()
    )  # a shared prefix for the packer
    assert [int(s.loss_mask.sum()) for s in rows.samples] == [2, 2, 2]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": ["1+1=?"]}, r"columns \['question'\]; expected messages, or prompt and response"),
        ({"messages": [json.dumps([{"role": "user", "content": "hi"}])]}, "row 0 has no assistant message"),
        (
            {"prompt": pa.array([], pa.string()), "response": pa.array([], pa.string())},
            "the file has no assistant message",
        ),
    ],
)
def test_unusable_demonstrations(tiny_model: Path, tmp_path: Path, columns, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_demonstrations(write(tmp_path / "d.parquet", **columns), tiny_model)


def test_groups_without_variance_count_before_the_filters(round_request) -> None:
    """Of 12 groups: 3 flat and dropped, 1 dropped and flat but for a penalty, 2 flat and kept, 1 that nobody judged."""

    def edit(rows, judged) -> None:
        groups = [judged[start : start + 4] for start in range(0, 48, 4)]
        for group in groups[:6]:
            for judgement in group:
                judgement.reward, judgement.advantage = 1.0, 0.0
        for judgement in [row for group in groups[:4] for row in group]:
            judgement.dropped_by = "dynamic_sampling"
        groups[3][0].reward = 0.5
        for judgement in groups[4][:2]:  # the judge failed on two of four runs
            judgement.reward, judgement.dropped_by = math.nan, "judge_error"
        for judgement in groups[6]:
            judgement.reward, judgement.dropped_by = math.nan, "judge_error"
        for judgement in groups[7]:
            judgement.dropped_by = "std_threshold"

    rows = read(round_request(edit=edit))
    assert rows.dropped == 26
    assert rows.zero_variance_groups == pytest.approx(6 / 11)


def test_a_runs_reward_is_its_last_steps(round_request) -> None:
    """Runs become steps of fewer runs: the rewards 0 and 1 of the steps before say nothing."""

    def edit(rows, judged) -> None:
        for place, (row, judgement) in enumerate(zip(rows, judged, strict=True)):
            row.run_id = judgement.run_id = f"{place // 2 % 2}"  # the same ids in every group
            row.step = judgement.step = 1 - place % 2
            judgement.reward = 1.0 if row.step == 0 or place < 8 else float(place % 4 == 0)
            judgement.reward *= row.step or place % 3

    rows = read(round_request(groups=4, edit=edit))
    assert rows.zero_variance_groups == 0.5


def test_a_round_that_trains_nothing_reports_groups_without_variance(session, round_request) -> None:
    def flatten(rows, judged) -> None:
        for judgement in judged:
            judgement.reward, judgement.dropped_by = 1.0, "zero_variance"

    result = session.train(round_request(edit=flatten), lambda event: None, lambda: False)
    assert result.steps == 0
    assert result.metrics["zero_variance_groups"] == 1.0


def weighed(tmp_path: Path, *weights: object) -> Path:
    """Demonstrations of one conversation, its answers weighed so; None: without a weight."""
    messages = []
    for number, weight in enumerate(weights):
        given = {} if weight is None else {"weight": weight}
        messages += [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "yes"} | given]
    file = tmp_path / "weighed.parquet"
    pq.write_table(pa.table({"messages": [json.dumps(messages)]}), file)
    return file


def test_a_messages_weight_scales_its_loss(tiny_model: Path, tmp_path: Path) -> None:
    rows = read_demonstrations(str(weighed(tmp_path, None, 0, 0.5, 2)), tiny_model)
    assert [(sample.row_id, sample.weight) for sample in rows.samples] == [("0:1", 1.0), ("0:5", 0.5), ("0:7", 2.0)]


def test_rows_are_read_again_for_other_end_tokens(tiny_model: Path, tmp_path: Path) -> None:
    file, planner = str(weighed(tmp_path, None)), Planner()
    other = shutil.copytree(tiny_model, tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(512))}))
    one, two = (planner._read(read_demonstrations, file, folder, None).samples[0] for folder in (tiny_model, other))
    assert len(two.token_ids) > len(one.token_ids)


@pytest.mark.parametrize("weight", [-1, "much", math.inf, [1]])
def test_a_weight_that_is_none_is_refused(tiny_model: Path, tmp_path: Path, weight: object) -> None:
    with pytest.raises(UserError, match=r"row 0\[3\]: weight is .*; expected a number of at least 0"):
        read_demonstrations(str(weighed(tmp_path, 1, weight)), tiny_model)


@pytest.mark.slow
def test_half_the_weight_is_half_the_loss(session, sft_request, tiny_model: Path, tmp_path: Path) -> None:
    loss = {}
    for weight in (1, 0.5):
        request = sft_request(
            [("", "")], demonstrations=str(weighed(tmp_path, weight)), output=str(tmp_path / f"{weight}")
        )
        events = []
        session.train(request, events.append, lambda: False)
        loss[weight] = events[0].metrics["loss"]
    assert loss[0.5] == pytest.approx(loss[1] / 2, rel=1e-6)


def test_a_decay_that_there_is_not_has_no_end(round_request, tiny_model: Path) -> None:
    """The end of the run changes what a decay does, and nothing under a constant rate."""

    def identity(**fields) -> str:
        critic = CriticSpec(optimizer=OptimizerSpec(**fields))
        algorithm = AlgorithmSpec(token_advantage="gae", critic=critic)
        request = round_request(optimizer=OptimizerSpec(**fields), algorithm=algorithm)
        return Planner().plan(request, tiny_model, "parent", Objective.build(request.algorithm)).identity

    assert identity(total_steps=3) == identity(total_steps=30) == identity()
    assert identity(lr_scheduler_type="linear", total_steps=3) != identity(lr_scheduler_type="linear", total_steps=30)
    assert identity(lr_warmup_steps=1) != identity()
