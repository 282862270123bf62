"""The memory plan: near what was measured on a GPU, and each thing that does not fit is refused with what to change."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_platform.config import memory_plan
from rft_platform.config.dry_run import render_plan, run_plan
from rft_platform.config.gpu_models import TrainerModel, gpu_models
from rft_platform.config.memory_plan import (
    GIB,
    MemoryChoice,
    TrainerMemory,
    choose_memory,
    gpu_bytes,
    memory_lines,
    memory_problems,
    trainer_memory,
)
from rft_platform.config.model_shape import ModelShape
from rft_platform.config.resolve import RunSettings, resolve
from rft_platform.config.schema.rft_config import RftConfig

#: Qwen3 0.6B, the shape of the measurements.
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
PARAMETERS = 596_049_920
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED, MEASURED_ROUNDS = RESULTS / "training_step_gpu.json", RESULTS / "round_gpu_4b.json"


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
        "trainer": {"max_token_len_per_gpu": 32768, "cpu_offload": False, **sections.pop("trainer", {})},
        "explorer": {"rollout_model": {"gpu_memory_utilization": 0.35}},
    }
    return resolve(RftConfig.model_validate({**config, **sections}))


def trained_first(run: RunSettings, gpus: int = 1) -> tuple[TrainerModel, ...]:
    """The models that the trainer holds for the first policy."""
    on_gpus = gpu_models(run, gpus)
    assert on_gpus is not None
    return on_gpus.trainings[0]


def planned(run: RunSettings) -> TrainerMemory:
    """The trainer's memory with the values of ``run``, which sets all of them."""
    return trainer_memory(run, trained_first(run), choose_memory(run, 0, None))


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
        needed = planned(settings(model, trainer=trainer))
        assert needed.in_use / GIB == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(("name", "ranks"), [("0.6b", 1), ("0.6b", 2), ("4b", 1), ("4b", 2)])
@pytest.mark.parametrize("once", ["no", "yes"])
def test_the_memory_of_one_and_two_ranks_is_near_the_measured_peak(
    tmp_path: Path, name: str, ranks: int, once: str
) -> None:
    """The communication's buffers are not torch's, so the benchmark does not count them."""
    cases = json.loads(MEASURED.read_text())["two_gpus"]["runs"][f"{name}, {ranks} rank{'s' * (ranks > 1)}"]
    peaks = [step["peak_gb"] for case in cases if case["once"] == once for step in case["steps"]]
    run = open_settings(tmp_path, name, mode="colocate", trainer={"nproc": ranks})
    tokens = cases[0]["max_tokens"]
    needed = trainer_memory(run, trained_first(run), MemoryChoice(tokens, False, False, 0.3, reduce_once=once == "yes"))
    buffers = GIB if ranks > 1 else 0
    assert (needed.in_use - buffers) / GIB == pytest.approx(max(peaks), rel=0.05)


@pytest.mark.parametrize(
    ("sections", "gpus", "gib", "words"),
    [
        ({}, 1, 141, None),
        ({}, 2, 64, None),
        ({"trainer": {"gradient_checkpointing": False}}, 1, 80, "set trainer.max_token_len_per_gpu to 27648 or less"),
        ({}, 1, 80, None),
        ({}, 1, 24, "lower explorer.rollout_model.gpu_memory_utilization, or leave it out"),
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
    run = settings(model, trainer={"gradient_checkpointing": False})
    (problem,) = memory_problems(run, 1, 80 * GIB)
    tokens = int(problem.partition("max_token_len_per_gpu to ")[2].split()[0])
    trainer = run.config.trainer.model_copy(update={"max_token_len_per_gpu": tokens})
    fitting = replace(run, config=run.config.model_copy(update={"trainer": trainer}))
    assert list(memory_problems(fitting, 1, 80 * GIB)) == []


def test_the_dry_run_shows_the_memory_where_there_is_a_gpu(model: Path) -> None:
    run = settings(model, engine={"kind": "vllm"})
    text = render_plan(run_plan(run, gpu_count=1, gpu_bytes=141 * GIB))
    assert "activations of 32,768 tokens 40.2 GiB" in text
    assert "engine: 49.3 GiB of 141.0 GiB (gpu_memory_utilization)" in text
    assert memory_lines(run, 0, None) == []
    assert list(memory_problems(run, 1, None)) == []


@pytest.mark.parametrize(
    ("engine", "dtype", "of_weights", "of_a_token"),
    [
        ({"kind": "vllm"}, "bfloat16", 1_192_099_840, 114_688),
        ({"kind": "vllm"}, "float32", 2_384_199_680, 229_376),
        ({"kind": "vllm", "dtype": "float32"}, "bfloat16", 2_384_199_680, 229_376),
        ({"kind": "transformers"}, "float32", 1_192_099_840, 114_688),
    ],
)
def test_an_engine_needs_the_bytes_of_its_data_type(
    model: Path, engine: dict[str, str], dtype: str, of_weights: int, of_a_token: int
) -> None:
    on_gpus = gpu_models(settings(model, engine=engine, explorer={"rollout_model": {"dtype": dtype}}), 1)
    assert on_gpus is not None
    assert (on_gpus.engines[0].weights, on_gpus.engines[0].cache_bytes) == (of_weights, of_a_token)


def test_the_reasons_are_those_of_this_run(model: Path) -> None:
    lora = {"model_path": str(model), "max_model_len": 2048, "lora_configs": [{"lora_rank": 16}]}
    run = settings(model, model=lora, engine={"kind": "transformers"}, trainer={"cpu_offload": None}, explorer={})
    choice = MemoryChoice(8192, True, True, 0.5)
    alone, shared = (", ".join(memory_plan._chosen(run, choice, gpus)) for gpus in (2, 1))
    assert "tokens do not fit)" in alone and "tokens do not fit beside the engine)" in shared
    assert "trainer.cpu_offload true (the weights below the adapter do not fit" in alone
    assert "gpu_memory_utilization" not in alone
    assert "gpu_memory_utilization" not in " ".join(memory_lines(run, 2, 80 * GIB))


@pytest.mark.parametrize(
    ("visible", "gib"), [(None, 2), ("1", 80), ("GPU-b", 80), ("1,0", 2), ("NoDevFiles", None), ("MIG-c", None)]
)
def test_only_gpus_that_the_process_may_use_limit_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, gib: int | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0, GPU-a1, 2048\\n1, GPU-b2, 81920\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_bytes() == (None if gib is None else gib * GIB)


def test_memory_of_reference_and_critic_is_counted(model: Path) -> None:
    plain = planned(settings(model)).state
    assert plain == 16 * PARAMETERS
    assert planned(settings(model, trainer={"nproc": 2})).state == plain // 2
    assert planned(settings(model, trainer={"cpu_offload": True})).state == 0
    assert (
        planned(settings(model, algorithm={"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.1}})).state
        == plain + 2 * PARAMETERS
    )
    assert planned(settings(model, algorithm={"algorithm_type": "ppo"})).state == 2 * plain


def test_an_adapter_needs_the_base_model_once_in_16_bits(model: Path) -> None:
    sections = {"model": {"model_path": str(model), "lora_configs": [{"lora_rank": 16}]}}
    adapter = planned(settings(model, **sections))
    weights = 28 * 16 * (7 * 1024 + 2 * 2048 + 2 * 1024 + 3 * 3072)
    assert adapter.state == 2 * PARAMETERS + 16 * weights
    assert adapter.gathered < adapter.state // 10
    assert planned(settings(model)).gathered == 2 * PARAMETERS


def test_a_model_that_is_not_a_local_folder_has_no_shape(tmp_path: Path) -> None:
    assert ModelShape.read(tmp_path / "Qwen" / "Qwen3-0.6B") is None
    (tmp_path / "config.json").write_text("[]")
    assert ModelShape.read(tmp_path) is None


#: Qwen3 shapes, each with its number of parameters.
SHAPES = {
    "0.6b": ({}, PARAMETERS),
    "4b": (
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
        4.02e9,
    ),
    "8b": (
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        8.19e9,
    ),
    "1.7b": ({"hidden_size": 2048, "intermediate_size": 6144}, 1.72e9),
    "32b": (
        {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
        32.76e9,
    ),
}
H100 = 81559 * 2**20
LORA = {"lora_configs": [{"lora_rank": 16}]}
VLLM = {"kind": "vllm"}


def open_settings(tmp_path: Path, name: str, **sections: Any) -> RunSettings:
    """A project that leaves all memory settings open, on a model of which only the configuration was fetched."""
    sizes, _ = SHAPES[name]
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({**SHAPE, **sizes, "tie_word_embeddings": name not in ("8b", "32b")})
    )
    config: dict[str, Any] = {
        "model": {"model_path": str(folder), "max_model_len": 2048, **sections.pop("model", {})},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
        **sections,
    }
    return resolve(RftConfig.model_validate(config))


@pytest.mark.parametrize("name", list(SHAPES))
def test_parameters_are_computed_where_only_the_configuration_is_there(tmp_path: Path, name: str) -> None:
    run = open_settings(tmp_path, name)
    shape = ModelShape.of(run.config.model.model_path)
    assert shape is not None
    assert shape.parameters == pytest.approx(SHAPES[name][1], rel=0.001)


@pytest.mark.parametrize(
    ("name", "sections", "gpus", "checkpointing", "offload", "least_pack"),
    [
        ("0.6b", {}, 1, False, False, 24576),
        ("0.6b", {}, 2, False, False, 32768),
        ("4b", {"model": LORA}, 1, False, False, 8192),
        ("4b", {}, 1, False, True, 8192),
        ("4b", {}, 2, True, False, 2048),
        ("4b", {"mode": "colocate", "trainer": {"nproc": 2}}, 2, True, False, 8192),
        ("4b", {"trainer": {"nproc": 4}}, 8, False, False, 8192),
        ("8b", {"model": LORA}, 1, True, False, 8192),
        ("8b", {"model": LORA}, 2, False, False, 8192),
        ("8b", {"trainer": {"nproc": 4}}, 8, True, False, 8192),
        ("8b", {"mode": "colocate", "trainer": {"nproc": 4}}, 4, True, False, 8192),
        ("4b", {"engine": VLLM}, 1, False, True, 8192),
        ("4b", {"engine": VLLM, "mode": "colocate", "trainer": {"nproc": 2}}, 2, False, False, 8192),
        ("8b", {"engine": VLLM, "model": LORA}, 1, False, False, 8192),
        ("8b", {"engine": VLLM, "mode": "colocate", "trainer": {"nproc": 4}}, 4, True, False, 8192),
    ],
)
def test_open_values_are_chosen_so_that_training_fits_h100s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, sections: dict[str, Any], gpus: int, checkpointing: bool, offload: bool, least_pack: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(memory_plan, "virtual_memory", lambda: SimpleNamespace(total=128 * GIB))
    run = open_settings(tmp_path, name, **sections)
    assert list(memory_problems(run, gpus, H100)) == []
    choice = choose_memory(run, gpus, H100)
    assert (choice.gradient_checkpointing, choice.cpu_offload) == (checkpointing, offload)
    assert least_pack <= choice.max_tokens_per_pack <= 32768
    assert 0.1 <= choice.engine_share <= 0.9
    lines = "\n".join(memory_lines(run, gpus, H100))
    assert f"trainer.max_token_len_per_gpu {choice.max_tokens_per_pack}" in lines
    assert ("packs of 8,192 tokens do not fit" in lines) == checkpointing


@pytest.mark.parametrize(
    ("name", "measured", "key", "sections", "choice"),
    [
        (
            "4b", "earlier: full training of 4B on both GPUs (mode colocate, 2 ranks, engine on the first)",
            "peak_gib_of_the_second_rank", {"trainer": {"nproc": 2}, "mode": "colocate"},
            MemoryChoice(16384, True, False, 0.36),
        ),
        (
            "4b", "earlier: LoRA rank 16 on 4B, one GPU", "peak_gib", {"model": LORA},
            MemoryChoice(10240, False, False, 0.27),
        ),
        (
            "8b", "earlier: LoRA rank 16 on 8B, one GPU", "peak_gib", {"model": LORA},
            MemoryChoice(32768, True, False, 0.46),
        ),
        (
            "4b", "takes turns: full training of 4B on both GPUs (mode colocate, 2 ranks, engine on the first)",
            "peak_gib_of_the_second_rank", {"trainer": {"nproc": 2}, "mode": "colocate"},
            MemoryChoice(8192, False, False, 0.52, True),
        ),
    ],
)  # fmt: skip
def test_the_plan_is_near_what_whole_rounds_used(
    tmp_path: Path, name: str, measured: str, key: str, sections: dict[str, Any], choice: MemoryChoice
) -> None:
    """The peaks are those of the whole process, as nvidia-smi shows them."""
    run = open_settings(tmp_path, name, **sections)
    peak = json.loads(MEASURED_ROUNDS.read_text())[measured][key]
    assert trainer_memory(run, trained_first(run), choice).total / GIB == pytest.approx(peak, rel=0.04)


@pytest.mark.parametrize(
    ("name", "sections", "gib", "once"),
    [
        ("0.6b", {}, 80, True),
        ("4b", {}, 80, False),
        ("4b", {}, 141, True),
        ("8b", {"model": LORA}, 80, False),
        ("8b", {"model": LORA}, 141, True),
        ("0.6b", {"trainer": {"nproc": 1}}, 80, True),
        ("8b", {"trainer": {"nproc": 1}, "model": LORA}, 141, False),
        ("0.6b", {"trainer": {"nproc": 2, "max_token_len_per_gpu": 4096}}, 80, True),
        ("0.6b", {"trainer": {"nproc": 2, "reduce_dtype": "bfloat16"}}, 80, False),
        ("0.6b", {"trainer": {"nproc": 2, "cpu_offload": True}}, 80, False),
    ],
)
def test_gradients_are_summed_once_a_step_if_the_memory_suffices(
    tmp_path: Path, name: str, sections: dict[str, Any], gib: int, once: bool
) -> None:
    run = open_settings(tmp_path, name, **{**COLOCATED, **sections})
    choice = choose_memory(run, 2, gib * GIB)
    assert choice.reduce_once == once
    several = run.config.trainer.nproc > 1
    lines = "\n".join(memory_lines(run, 2, gib * GIB))
    assert ("gather weights and sum gradients once a step" in lines) == (once and several)
    if once:
        less = trainer_memory(run, trained_first(run), replace(choice, reduce_once=False)).training
        needed = trainer_memory(run, trained_first(run), choice).training
        assert needed > less if several else needed == less
        assert choice.max_tokens_per_pack >= (run.config.trainer.max_token_len_per_gpu or 8192)


def test_packs_of_less_than_half_are_not_the_price_for_sums_once_a_step(tmp_path: Path) -> None:
    """8B with an adapter on 4 ranks of 40 GB: packs of 8,192 tokens with the sums once a step, 32,768 without."""
    sections = {**COLOCATED, "trainer": {"nproc": 4}, "model": LORA, "explorer": {"runner_per_model": 512}}
    run = open_settings(tmp_path, "8b", **sections)
    choice = choose_memory(run, 4, 40 * GIB)
    assert not choice.reduce_once and choice.max_tokens_per_pack > 16384
    smaller = replace(choice, reduce_once=True, max_tokens_per_pack=choice.max_tokens_per_pack // 2)
    assert trainer_memory(run, trained_first(run), smaller).total > 0.97 * 40 * GIB - 4 * GIB  # the graphs


def test_the_cache_of_the_engine_comes_before_training_without_checkpointing(tmp_path: Path) -> None:
    few = choose_memory(open_settings(tmp_path, "4b", model=LORA), 1, H100)
    many = choose_memory(open_settings(tmp_path, "4b", model=LORA, explorer={"runner_per_model": 512}), 1, H100)
    assert (few.gradient_checkpointing, many.gradient_checkpointing) == (False, True)
    assert few.engine_share < many.engine_share == 0.6


def test_an_engine_sleeps_where_engine_and_trainer_take_turns(tmp_path: Path) -> None:
    many = {"runner_per_model": 512}
    alternating = open_settings(tmp_path, "4b", model=LORA, engine=VLLM, explorer=many)
    choice = choose_memory(alternating, 1, H100)
    assert (choice.engine_sleeps, choice.gradient_checkpointing) == (True, False)
    assert choice.engine_share > 0.7
    assert "enable_sleep_mode true (engine and trainer take turns" in "\n".join(memory_lines(alternating, 1, H100))
    kept = trainer_memory(alternating, trained_first(alternating), choice).at_rest
    assert kept + choice.engine_share * H100 < H100 - 4 * GIB  # graphs and contexts stay on the GPU

    others: list[dict[str, Any]] = [
        {"explorer": {}},  # everything fits without sleeping
        {"synchronizer": {"sync_offset": 1}},
        {"engine": {"kind": "transformers"}},
        {"explorer": {**many, "rollout_model": {"enable_sleep_mode": False}}},
    ]
    for other in others:
        run = open_settings(tmp_path, "4b", **{"model": LORA, "engine": VLLM, "explorer": many, **other})
        assert not choose_memory(run, 1, H100).engine_sleeps, other
        assert list(memory_problems(run, 1, H100)) == []
    assert not choose_memory(alternating, 2, H100).engine_sleeps  # a GPU each


def test_sleep_is_refused_in_modes_that_cannot_wait_for_the_engine(tmp_path: Path) -> None:
    explorer = {"rollout_model": {"enable_sleep_mode": True}}
    run = open_settings(tmp_path, "0.6b", engine=VLLM, explorer=explorer)
    assert choose_memory(run, 1, H100).engine_sleeps
    assert list(memory_problems(run, 1, H100)) == []
    both = open_settings(tmp_path, "0.6b", engine=VLLM, explorer=explorer, synchronizer={"sync_offset": 1})
    (problem,) = memory_problems(both, 1, H100)
    assert "synchronizer.sync_offset" in problem and "leave the key out" in problem


def test_a_share_that_the_trainers_state_does_not_leave_is_refused(tmp_path: Path) -> None:
    explorer = {"rollout_model": {"enable_sleep_mode": True, "gpu_memory_utilization": 0.9}}
    run = open_settings(tmp_path, "0.6b", engine=VLLM, explorer=explorer, trainer={"cpu_offload": False})
    problem = next(memory_problems(run, 1, H100))
    assert "gpu_memory_utilization 0.9" in problem and "keeps between two rounds" in problem


def test_a_state_is_offloaded_only_to_a_host_that_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_settings(tmp_path, "4b")
    for gib, offload in ((128, True), (64, False)):
        monkeypatch.setattr(memory_plan, "virtual_memory", lambda gib=gib: SimpleNamespace(total=gib * GIB))
        assert choose_memory(run, 1, H100).cpu_offload == offload
    assert "train an adapter" in next(memory_problems(run, 1, H100))


def test_values_of_the_user_are_kept(tmp_path: Path) -> None:
    trainer = {"max_token_len_per_gpu": 4096, "gradient_checkpointing": True, "cpu_offload": True}
    explorer = {"rollout_model": {"gpu_memory_utilization": 0.31}}
    run = open_settings(tmp_path, "4b", trainer=trainer, explorer=explorer)
    assert choose_memory(run, 1, H100) == MemoryChoice(4096, True, True, 0.31)
    assert "chosen" not in "\n".join(memory_lines(run, 1, H100))


def test_a_model_that_fits_nowhere_is_refused_with_what_to_change(tmp_path: Path) -> None:
    run = open_settings(tmp_path, "8b", trainer={"cpu_offload": False})
    (problem,) = memory_problems(run, 1, H100)
    assert "set trainer.cpu_offload to true" in problem


def test_without_a_gpu_the_memory_choice_is_the_default(tmp_path: Path) -> None:
    run = open_settings(tmp_path, "0.6b")
    assert choose_memory(run, 0, None) == MemoryChoice(16384, False, False, 0.9)


@pytest.mark.parametrize(
    ("nodes", "same"),
    [
        ({"cluster": {"kind": "ray", "node_num": 2}}, True),
        ({"cluster": {"node_num": 2}, "trainer": {"rendezvous": {"endpoint": "first:29500"}}}, True),
        ({"cluster": {"node_num": 2}}, False),
    ],
)
def test_the_state_is_divided_by_the_ranks_of_all_nodes(model: Path, nodes: dict[str, Any], same: bool) -> None:
    two = planned(settings(model, trainer={"nproc": 2}))
    assert (planned(settings(model, **nodes)) == two) == same


def test_an_adapter_of_a_higher_rank_needs_more_memory(tmp_path: Path) -> None:
    choices, needed = [], []
    for rank in (16, 256):
        run = open_settings(tmp_path, "8b", model={"lora_configs": [{"lora_rank": rank}]})
        choices.append(choose_memory(run, 2, H100))
        needed.append(trainer_memory(run, trained_first(run), choices[-1]))
    assert needed[1].state - needed[0].state == pytest.approx(9.75 * GIB, rel=0.01)
    assert choices[1].max_tokens_per_pack < choices[0].max_tokens_per_pack
    run = open_settings(tmp_path, "8b", model={"lora_configs": [{"lora_rank": 16, "target_modules": ["q_proj"]}]})
    (only,) = trained_first(run)
    assert only.adapter == 36 * 16 * (4096 + 4096)


def config_of(tmp_path: Path, name: str) -> str:
    """A folder with the configuration of a shape."""
    return open_settings(tmp_path, name).config.model.model_path


COLOCATED = {"mode": "colocate", "trainer": {"nproc": 2}, "engine": VLLM}


def test_a_further_policy_counts_with_its_own_size(tmp_path: Path) -> None:
    rival = [{"name": "rival", "model_path": config_of(tmp_path, "4b")}]
    run = open_settings(tmp_path, "0.6b", **COLOCATED, policies=rival)
    chosen = choose_memory(run, 2, H100)
    assert chosen == choose_memory(open_settings(tmp_path, "4b", **COLOCATED), 2, H100)
    assert list(memory_problems(run, 2, H100)) == []

    sizes = {"nproc": 2, "max_token_len_per_gpu": 32768, "gradient_checkpointing": False}
    fixed = open_settings(tmp_path, "0.6b", **{**COLOCATED, "trainer": sizes}, policies=rival)
    (problem,) = memory_problems(fixed, 2, H100)
    assert "policies (rival).model_path" in problem and "leave out trainer.gradient_checkpointing" in problem

    frozen = [{**rival[0], "train": False}]
    assert (
        list(
            memory_problems(
                open_settings(tmp_path, "0.6b", **{**COLOCATED, "trainer": sizes}, policies=frozen), 2, H100
            )
        )
        == []
    )


def test_an_auxiliary_model_on_a_gpu_of_the_trainer_is_part_of_the_plan(tmp_path: Path) -> None:
    judge = {"name": "judge", "model_path": config_of(tmp_path, "8b"), "max_model_len": 4096}
    alone = choose_memory(open_settings(tmp_path, "0.6b", **COLOCATED), 2, H100)
    run = open_settings(tmp_path, "0.6b", **COLOCATED, explorer={"auxiliary_models": [judge]})
    assert list(memory_problems(run, 2, H100)) == []
    choice = choose_memory(run, 2, H100)
    assert choice != alone
    assert choice.engine_share * H100 > 2 * 8.19e9 + 2 * GIB + 4096 * 4 * 36 * 1024
    assert "\nengine of judge: " in "\n".join(memory_lines(run, 2, H100))

    own_gpu = open_settings(tmp_path, "0.6b", mode="colocate", engine=VLLM, explorer={"auxiliary_models": [judge]})
    one_rank = open_settings(tmp_path, "0.6b", mode="colocate", engine=VLLM)
    assert choose_memory(own_gpu, 2, H100) == choose_memory(one_rank, 2, H100)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.2, "explorer.auxiliary_models (judge).gpu_memory_utilization 0.2 gives the engine of judge 15.9 GiB, and"),
        (0.9, "beside the engine's 73.7 GiB"),
    ],
)
def test_a_share_of_an_auxiliary_model_that_does_not_fit_is_refused(tmp_path: Path, share: float, words: str) -> None:
    judge = {"name": "judge", "model_path": config_of(tmp_path, "8b"), "gpu_memory_utilization": share}
    trainer = {"nproc": 2, "max_token_len_per_gpu": 32768}
    explorer = {"auxiliary_models": [judge], "rollout_model": {"enable_sleep_mode": False}}
    run = open_settings(tmp_path, "0.6b", **{**COLOCATED, "trainer": trainer}, explorer=explorer)
    (problem,) = memory_problems(run, 2, H100)
    assert words in problem
    if share == 0.9:
        assert "lower explorer.auxiliary_models (judge).gpu_memory_utilization, or leave it out" in problem


def test_each_engine_is_compared_with_its_own_weights(tmp_path: Path) -> None:
    rival = [{"name": "rival", "model_path": config_of(tmp_path, "8b"), "train": False}]
    explorer = {"rollout_model": {"gpu_memory_utilization": 0.2}}
    run = open_settings(tmp_path, "0.6b", **COLOCATED, policies=rival, explorer=explorer)
    (problem,) = memory_problems(run, 2, H100)
    assert "gives the engine of policy rival 15.9 GiB, and 15.3 GiB of weights" in problem
    lines = "\n".join(memory_lines(run, 2, H100))
    assert "\nengine of policy rival: 15.9 GiB" in lines


def test_teacher_and_critic_count_with_their_own_size(tmp_path: Path) -> None:
    large = config_of(tmp_path, "8b")
    distilled = {"algorithm_type": "on_policy_distill", "teacher_model_path": large}
    run = open_settings(tmp_path, "0.6b", algorithm=distilled)
    _, teacher = trained_first(run)
    assert teacher.key == "algorithm.teacher_model_path"
    needed = trainer_memory(run, trained_first(run), MemoryChoice(8192, False, False, 0.3))
    assert needed.state == pytest.approx(16 * PARAMETERS + 2 * 8.19e9, rel=0.001)

    config: dict[str, Any] = {"model": {"critic_model_path": large}, "algorithm": {"algorithm_type": "ppo"}}
    run = open_settings(tmp_path, "0.6b", **config)
    needed = trainer_memory(run, trained_first(run), MemoryChoice(8192, False, False, 0.3))
    assert needed.state == pytest.approx(16 * PARAMETERS + 16 * 8.19e9, rel=0.001)
    run = open_settings(tmp_path, "0.6b", **config, trainer={"cpu_offload": False})
    assert "model.critic_model_path 122.0 GiB" in next(memory_problems(run, 2, H100))


def test_a_teacher_that_does_not_fit_is_named(tmp_path: Path) -> None:
    distilled = {"algorithm_type": "on_policy_distill", "teacher_model_path": config_of(tmp_path, "32b")}
    run = open_settings(tmp_path, "1.7b", algorithm=distilled, trainer={"cpu_offload": False})
    (problem,) = memory_problems(run, 2, H100)
    assert "algorithm.teacher_model_path 61.0 GiB" in problem


def test_a_whole_model_is_loaded_on_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the ranks then keep only a part, or nothing."""
    monkeypatch.setattr(memory_plan, "virtual_memory", lambda: SimpleNamespace(total=2000 * GIB))
    ranks = {"mode": "colocate", "trainer": {"nproc": 2, "cpu_offload": True}, "engine": {"kind": "transformers"}}
    run = open_settings(tmp_path, "8b", **ranks)
    choice = choose_memory(run, 2, H100)
    needed = trainer_memory(run, trained_first(run), choice)
    assert needed.loading > needed.training
    assert needed.total == needed.loading == pytest.approx(33.8 * GIB, rel=0.01)
    assert choice.engine_share * H100 < H100 - needed.loading
    assert "while a model is loaded 33.8 GiB" in "\n".join(memory_lines(run, 2, H100))

    explorer = {"rollout_model": {"gpu_memory_utilization": 0.6}}
    run = open_settings(tmp_path, "8b", **ranks, explorer=explorer)
    (problem,) = memory_problems(run, 2, H100)
    assert "while it loads the models of model.model_path" in problem
    assert "lower explorer.rollout_model.gpu_memory_utilization" in problem

    explorer = {"rollout_model": {"tensor_parallel_size": 2}}
    run = open_settings(tmp_path, "32b", mode="colocate", trainer={"nproc": 8}, explorer=explorer)
    (problem,) = memory_problems(run, 8, H100)
    assert "trainer: needs about 125.9 GiB" in problem and "use smaller models, or a GPU with more memory" in problem
    adapter = open_settings(tmp_path, "8b", model=LORA)
    loaded = trainer_memory(adapter, trained_first(adapter), choose_memory(adapter, 1, H100)).loaded
    assert loaded == pytest.approx(2 * (8.19e9 + 0.62e9) + 4 * 43.6e6, rel=0.001)
