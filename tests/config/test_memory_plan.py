"""The memory plan: near what was measured on a GPU, and each thing that does not fit is refused with what to change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rft_platform.config.dry_run import render_plan, run_plan
from rft_platform.config.memory_plan import GIB, ModelShape, memory_lines, memory_problems, trainer_memory
from rft_platform.config.resolve import RunSettings, resolve
from rft_platform.config.schema.rft_config import RftConfig

#: Qwen3 0.6B, the shape of the measurements.
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
PARAMETERS = 596_049_920
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "training_step_gpu.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the shape's configuration and the header of its weights; they have no content."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "weight": {"dtype": "BF16", "shape": [PARAMETERS // 2, 2], "data_offsets": [0, 0]},
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def settings(folder: Path, **sections: Any) -> RunSettings:
    config: dict[str, Any] = {
        "model": {"model_path": str(folder), "max_model_len": 2048},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "trainer": {"max_token_len_per_gpu": 32768, **sections.pop("trainer", {})},
        "explorer": {"rollout_model": {"gpu_memory_utilization": 0.35}},
    }
    return resolve(RftConfig.model_validate({**config, **sections}))


def test_the_trainers_memory_is_near_the_measured_peak(model: Path) -> None:
    """The benchmark notes the peak of torch's allocator: without the CUDA context."""
    shape = ModelShape.read(model)
    assert shape is not None
    assert shape.parameters == PARAMETERS
    measured = {
        (case["max_tokens"], case.get("checkpointing", False)): max(step["peak_gb"] for step in case["steps"])
        for case in json.loads(MEASURED.read_text())["results"]
    }
    assert set(measured) == {(16384, False), (32768, False), (32768, True)}
    for (tokens, checkpointing), peak in measured.items():
        trainer = {"max_token_len_per_gpu": tokens, "gradient_checkpointing": checkpointing}
        planned = trainer_memory(settings(model, trainer=trainer), shape)
        assert (planned.total / GIB - 1) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    ("sections", "gpus", "gib", "words"),
    [
        ({}, 1, 141, None),
        ({}, 2, 64, None),
        ({}, 1, 80, "set trainer.max_token_len_per_gpu to 28672 or less; or set trainer.gradient_checkpointing"),
        ({"trainer": {"gradient_checkpointing": True}}, 1, 80, None),
        ({}, 1, 24, "trainer.gradient_checkpointing"),
        ({"trainer": {"nproc": 2, "max_token_len_per_gpu": 8192}, "mode": "colocate"}, 2, 32, None),
        (
            {"model": {"max_model_len": 900_000}}, 2, 141,
            "one answer of 900,000 tokens do not fit: raise it, or raise tensor_parallel_size",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    model: Path, sections: dict[str, Any], gpus: int, gib: int, words: str | None
) -> None:
    if "model" in sections:
        sections = {**sections, "model": {"model_path": str(model), **sections["model"]}}
    found = list(memory_problems(settings(model, **sections), gpus, gib * GIB))
    if words is None:
        assert found == []
    else:
        assert len(found) == 1, found
        assert words in found[0]


def test_the_remedy_for_a_long_pack_is_right(model: Path) -> None:
    run = settings(model)
    (problem,) = memory_problems(run, 1, 80 * GIB)
    tokens = int(problem.partition("max_token_len_per_gpu to ")[2].split()[0])
    trainer = run.config.trainer.model_copy(update={"max_token_len_per_gpu": tokens})
    fitting = replace(run, config=run.config.model_copy(update={"trainer": trainer}))
    assert list(memory_problems(fitting, 1, 80 * GIB)) == []


def test_the_dry_run_shows_the_memory_where_there_is_a_gpu(model: Path) -> None:
    run = settings(model)
    text = render_plan(run_plan(run, gpu_count=1, gpu_bytes=141 * GIB))
    assert "activations of 32,768 tokens 40.2 GiB" in text
    assert "engine: 49.3 GiB of 141.0 GiB (gpu_memory_utilization)" in text
    assert memory_lines(run, 0, None) == []
    assert list(memory_problems(run, 1, None)) == []


def test_what_the_algorithm_adds_counts(model: Path) -> None:
    shape = ModelShape.read(model)
    assert shape is not None
    plain = trainer_memory(settings(model), shape).state
    assert plain == 16 * PARAMETERS
    assert trainer_memory(settings(model, trainer={"nproc": 2}), shape).state == plain // 2
    assert trainer_memory(settings(model, trainer={"cpu_offload": True}), shape).state == 0
    assert (
        trainer_memory(
            settings(model, algorithm={"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.1}}), shape
        ).state
        == plain + 2 * PARAMETERS
    )
    assert trainer_memory(settings(model, algorithm={"algorithm_type": "ppo"}), shape).state == 2 * plain


def test_an_adapter_needs_the_base_model_once_in_16_bits(model: Path) -> None:
    shape = ModelShape.read(model)
    assert shape is not None
    sections = {"model": {"model_path": str(model), "lora_configs": [{"lora_rank": 16}]}}
    adapter = trainer_memory(settings(model, **sections), shape)
    assert adapter.state == 2 * PARAMETERS
    assert adapter.gathered < adapter.state // 10
    assert trainer_memory(settings(model), shape).gathered == 2 * PARAMETERS


def test_a_model_that_is_not_a_local_folder_has_no_shape(tmp_path: Path) -> None:
    assert ModelShape.read(tmp_path / "Qwen" / "Qwen3-0.6B") is None
    (tmp_path / "config.json").write_text("[]")
    assert ModelShape.read(tmp_path) is None
