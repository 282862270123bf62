"""The cost model of ``benchmarks/scaling.py`` predicts measured rounds, and its published results are current."""

import json
import random
from dataclasses import replace
from typing import Any

import calibration
import cluster_model
import numpy as np
import pytest
import round_gpu
import round_model
import scaling

from tests.benchmarks.conftest import BENCHMARKS

PUBLISHED = json.loads((BENCHMARKS / "results" / "scaling.json").read_text())
PREDICTIONS = calibration.predictions()


@pytest.mark.parametrize(("each", "found"), PREDICTIONS, ids=[each.name for each, _ in PREDICTIONS])
def test_a_measured_round_is_predicted_within_15_percent(
    each: calibration.Measured, found: round_model.Prediction
) -> None:
    within = found.round == pytest.approx(each.seconds, rel=scaling.LIMIT)
    assert within == (not each.not_covered), f"measured {each.seconds:.1f} s, predicted {found.round:.1f}"


def test_every_result_with_rounds_on_gpus_is_compared() -> None:
    """A new file, task or run of ``round_gpu*.json`` must appear in ``calibration.measured``."""
    files = {file.stem for file in (BENCHMARKS / "results").glob("round_gpu*.json")}
    assert {each.source.split(":")[0] for each in calibration.measured()} == files
    runs = calibration.result("round_gpu_4b").items()
    with_rounds = [key for key, value in runs if isinstance(value, dict) and "rounds" in value]
    sources = {each.source for each in calibration.measured()}
    compared = {key for key in with_rounds if f"round_gpu_4b: {key}" in sources}
    assert set(with_rounds) - compared == {"earlier: LoRA rank 16 on 8B, one GPU"}  # it has no complete steady round
    overlap = calibration.result("round_gpu_overlap")
    found = calibration.result("round_gpu")
    alone = len(found["tasks"]) + sum(key.endswith("_beside_the_peer") for key in found)
    assert alone == sum(each.source.startswith("round_gpu:") for each in calibration.measured())
    tasks = len(overlap["tasks"]) + len(overlap[calibration.EARLIER]["tasks"])
    assert tasks == sum(each.source.startswith("round_gpu_overlap") for each in calibration.measured())


def test_most_rounds_verify_and_do_not_calibrate() -> None:
    verifying = [each for each in calibration.measured() if not each.calibrates and not each.not_covered]
    assert len(verifying) >= 8
    assert {each.setup.gpu for each in verifying} == {"H100", "H200"}
    assert {each.setup.shape for each in verifying} == {"0.6b", "4b", "8b"}


def test_phases_of_a_verifying_round_are_predicted_too() -> None:
    """Not only their sum: rollouts, and training with publishing, of the 8B adapter."""
    eight = calibration.result("round_gpu_4b")[calibration.EIGHT_B_ADAPTER]
    found = next(found for each, found in PREDICTIONS if each.name.startswith("8B"))
    assert found.rollouts == pytest.approx(calibration.steady(eight, "rollouts_s"), rel=scaling.LIMIT)
    assert found.training + found.publishing == pytest.approx(calibration.steady(eight, "train_s"), rel=scaling.LIMIT)


@pytest.mark.slow  # transformers
@pytest.mark.parametrize("name", ["even", "uneven"])
def test_lengths_are_those_of_the_measured_tasks(name: str) -> None:
    rows = calibration.rows(name)
    measured = [each["completion_tokens"] for each in calibration.result("round_gpu")["tasks"][name]["rounds"]]
    assert rows.answers.sum() == pytest.approx(np.median(measured), rel=0.06)
    from rft_platform.recipes.tiny_model import build_tokenizer

    tokenizer, task, rng = build_tokenizer(), round_gpu.TASKS[name], random.Random(7)
    texts = [f"what is the sum of {i} and {i * 7 % 13}? " * rng.randint(*task.repeats) for i in range(5 * task.tasks)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    tokens = np.mean([len(ids) for ids in encoded])
    assert rows.prompts.mean() == pytest.approx(tokens, rel=0.03)


def decoded(prompts: list[float], answers: list[float], **engine: float) -> float:
    costs = {"launch_s": 1.0, "weights_s": 0.0, "matrices_s": 0.0, "row_s": 0.0, "context_s": 0.0}
    rows = round_model.Rows(np.array(prompts), np.array(answers), 1)
    return round_model.decode_seconds(rows, round_model.Engine(**{**costs, **engine}))


def test_decoding_takes_as_many_steps_as_the_longest_answer() -> None:
    assert decoded([10, 10], [5, 30]) == 30
    assert decoded([10, 10], [5, 30], row_s=1.0) == 30 + 35
    assert decoded([10], [3], launch_s=0, context_s=1.0) == 10 + 11 + 12


def test_a_full_cache_makes_rows_wait_and_compute_their_tokens_again() -> None:
    assert decoded([10, 10], [32, 32], capacity=1000) == 32
    assert decoded([10, 10], [32, 32], capacity=60) > 32
    assert decoded([10, 10], [32, 32], capacity=43) == 64  # one after the other
    again = {"capacity": 70, "matrices_s": 0.01}
    assert decoded([10, 10], [32, 32], **again) - decoded([10, 10], [32, 32], capacity=70) > 0.01 * (20 + 64)


@pytest.mark.slow  # transformers builds the shape
def test_operations_are_those_of_the_trainer() -> None:
    """The trainer's own count, of a policy with one of the shapes, on the same rows."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from rft_platform.training.packed.flops import TrainingCost, Work, _from_data_sheet
    from rft_platform.training.packed.packed_policy import PackedPolicy

    shape = round_model.Shape.of("0.6b")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**round_model.SHAPES["0.6b"]))
    rows = round_model.Rows(np.full(8, 60.0), np.full(8, 500.0), 8)
    work = Work(60 + 8 * 500, 60 * 61 / 2 + 8 * (500 * 60 + 500 * 501 / 2), 8 * 500)
    expected = TrainingCost.of(PackedPolicy(model)).flops(work)
    assert round_model.training_flops(shape, rows) == pytest.approx(expected, rel=1e-6)
    assert shape.weights == pytest.approx(sum(each.numel() for each in model.parameters()), rel=1e-3)
    for gpu in round_model.GPUS.values():
        assert gpu.flops == _from_data_sheet(f"NVIDIA {gpu.name} 80GB HBM3", torch.bfloat16)


def test_a_change_removes_its_wait_and_more_gpus_make_more_rows() -> None:
    work, assumed = replace(scaling.WORKLOADS[0], rows_an_engine=64), cluster_model.Assumptions()
    small, large = (list(cluster_model.improve(gpus, work, assumed)) for gpus in (8, 64))
    rates = [found.rows / found.round for found, _ in large]
    assert rates == sorted(rates)
    assert large[0][1] == "reading weights"
    assert large[1][0].waits["reading weights"] < large[0][0].waits["reading weights"] / 10
    assert rates[-1] > 4 * small[-1][0].rows / small[-1][0].round
    assert all(0 < found.efficiency <= 1 for found, _ in small + large)


@pytest.mark.slow
def test_published_results_are_current() -> None:
    """After a change of the model or of measured results: ``python benchmarks/scaling.py``."""
    found = json.loads(json.dumps(scaling.report(cluster_model.Assumptions())))
    assert_close(found, PUBLISHED)


def test_the_page_has_the_published_tables() -> None:
    page = (BENCHMARKS.parent / "docs" / "scaling.md").read_text()
    for table in scaling.tables(PUBLISHED):
        assert table in page


def assert_close(found: Any, published: Any, place: str = "") -> None:
    """Equal but for rounding: another processor or version of Parquet may round differently."""
    if isinstance(found, dict):
        assert found.keys() == published.keys(), place
        for key, value in found.items():
            assert_close(value, published[key], f"{place}.{key}")
    elif isinstance(found, list):
        assert len(found) == len(published), place
        for number, value in enumerate(found):
            assert_close(value, published[number], f"{place}[{number}]")
    elif isinstance(found, float | int):
        assert found == pytest.approx(published, rel=0.02, abs=0.11), place
    else:
        assert found == published, place
