"""Settings of TRL's GRPO trainer become the same settings here, or one line says why not."""

from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.checks.settings import CONFIGURATION
from rft_platform.config.foreign.treatments import value_at
from rft_platform.config.foreign.trl import _KEYS, _READ, _WITHOUT_EQUIVALENT, convert_trl, is_trl
from rft_platform.config.load import build_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig

DATA = {"model_name_or_path": "model", "dataset_name": "tasks.jsonl"}


def converted(**given: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    return convert_trl({**DATA, "num_generations": 8, **given}, "file")


def test_a_foreign_file_is_recognised_by_keys_that_rft_yaml_lacks() -> None:
    assert is_trl({"num_generations": 4}) and is_trl({"model_name_or_path": "m", "learning_rate": 1e-6})
    shared = {key for key in _READ.split() + [key for key, _ in _KEYS] if key in RftConfig.model_fields}
    assert shared == {"seed"} and not is_trl({"seed": 1})
    assert not is_trl({"model": {}, "algorithm": {}, "buffer": {}})


def test_batches_are_tasks_and_experiences() -> None:
    settings, notices = converted(per_device_train_batch_size=16, gradient_accumulation_steps=4, max_steps=10)
    run = resolve(build_config(settings))
    assert (run.batches.batch_size, run.batches.repeat_times, run.batches.train_batch_size) == (8, 8, 64)
    assert run.config.trainer.total_steps == 10 and run.batches.steps_a_round == 1
    assert any("number of processes" in line for line in notices)
    settings, _ = converted(per_device_train_batch_size=8, steps_per_generation=4)
    run = resolve(build_config(settings))
    assert (run.batches.groups_a_round, run.batches.steps_a_round) == (4, 4)


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({}, "algorithm.loss_agg_mode", "token-mean"),
        ({"loss_type": "grpo"}, "algorithm.loss_agg_mode", "seq-mean-token-mean"),
        ({"loss_type": "dr_grpo"}, "algorithm.loss_agg_mode", "seq-mean-token-sum-norm"),
        ({}, "algorithm.policy_loss_fn_args", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
        ({"epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0}, "algorithm.policy_loss_fn_args",
         {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 4.0}),
        ({"scale_rewards": False}, "algorithm.advantage_fn_args", {"normalize_std": False}),
        ({"scale_rewards": "batch"}, "algorithm.advantage_fn_args", {"std_level": "batch"}),
        ({"beta": 0.04}, "algorithm.kl_loss_fn_args.kl_coef", 0.04),
        ({"importance_sampling_level": "sequence", "epsilon": 3e-4}, "algorithm.algorithm_type", "gspo"),
        ({"num_iterations": 2}, "algorithm.epochs", 2),
        ({"top_k": 0}, "model.top_k", -1),
        ({"use_vllm": True}, "engine.kind", "vllm"),
        ({}, "model.max_response_tokens", 256),
        ({}, "buffer.total_epochs", 3),
        ({"max_steps": None, "generation_batch_size": None}, "buffer.total_epochs", 3),
        ({"dataset_train_split": "test"}, "buffer.explorer_input.taskset.split", "test"),
        ({"adam_beta2": 0.95}, "algorithm.optimizer.betas", [0.9, 0.95]),
    ],
)  # fmt: skip
def test_settings_and_defaults_of_trl(given: dict[str, Any], key: str, value: object) -> None:
    settings, _ = converted(**given)
    assert value_at(settings, key) == value
    resolve(build_config(settings))


def test_the_name_of_the_run_is_that_of_the_project() -> None:
    assert [converted(**given)[0]["name"] for given in ({}, {"run_name": None}, {"run_name": "my-run"})] == [
        "from_trl", "from_trl", "my-run",
    ]  # fmt: skip


@pytest.mark.parametrize("given", [{}, {"max_steps": -1}, {"lr_scheduler_type": "cosine"}])
def test_a_decay_without_an_end_is_a_constant_rate(given: dict[str, Any]) -> None:
    settings, notices = converted(**given)
    run = resolve(build_config(settings))
    assert run.config.algorithm.optimizer.lr_scheduler_type == "constant"
    assert not [finding for check in CONFIGURATION for finding in check(run) if finding.level == "error"]
    assert any("max_steps is not set: the learning rate stays constant" in line for line in notices)
    settings, notices = converted(**given | {"max_steps": 10})
    assert value_at(settings, "algorithm.optimizer.lr_scheduler_type") == given.get("lr_scheduler_type", "linear")
    assert not any("max_steps" in line for line in notices)


def test_the_memory_plan_decides_whether_the_engine_sleeps() -> None:
    _, notices = converted(vllm_enable_sleep_mode=True)
    assert any("the memory plan decides whether the engine sleeps" in line for line in notices)
    assert not any("vllm_enable_sleep_mode" in line for line in converted(vllm_enable_sleep_mode=False)[1])


def test_a_second_bound_has_no_effect_on_the_ratio_of_sequences() -> None:
    _, notices = converted(importance_sampling_level="sequence", delta=4.0)
    assert any("delta 4.0 has no effect here: gspo has no second bound" in line for line in notices)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_type": "sapo2"}, "loss_type 'sapo2': expected one of grpo, dapo"),
        ({"fp16": True}, "set bf16"),
        ({"per_device_train_batch_size": 4}, "4 completions per generation are no multiple of num_generations 8"),
        ({"scale_rewards": "sometimes"}, "scale_rewards 'sometimes'"),
        ({"scale_rewards": ["group"]}, r"scale_rewards \['group'\]: expected group"),
        ({"loss_type": ["dapo"]}, r"loss_type \['dapo'\]: expected one of grpo, dapo"),
        ({"max_steps": "200"}, "^file: max_steps '200': expected a whole number, or -1 for no limit$"),
        ({"per_device_train_batch_size": None}, "per_device_train_batch_size None: expected a whole number above 0"),
        ({"num_generations": 0}, "num_generations 0: expected a whole number above 0"),
        ({"gradient_accumulation_steps": "4"}, "gradient_accumulation_steps '4': expected a whole number above 0"),
        ({"steps_per_generation": 1.5}, "steps_per_generation 1.5: expected a whole number above 0"),
        ({"use_peft": True, "use_rslora": True}, "multiply lora_alpha"),
        ({"load_in_4bit": True}, "not quantised"),
        ({"temperatur": 0.7}, r"^file: unknown key temperatur; did you mean temperature\?$"),
        ({"lora_rank": 8, "lorra_r": 8}, r"unknown key lorra_r; did you mean lora_r\?"),
    ],
)
def test_what_cannot_be_supported_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        converted(**given)


def test_a_setting_without_equivalent_is_reported() -> None:
    settings, notices = converted(reward_weights=[1, 2], push_to_hub=True, no_such_setting=3)
    assert not {"no_such_setting", "push_to_hub"} & settings.keys()
    assert any("push_to_hub has no equivalent here" in line for line in notices)
    assert any("no_such_setting is no known key of TRL" in line for line in notices)
    assert any("reward_weights has no effect here" in line for line in notices)


@pytest.mark.parametrize(
    ("given", "adapter"),
    [
        ({"use_peft": True}, {"lora_rank": 16, "lora_alpha": 32}),
        ({"use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["q_proj", "v_proj"]},
         {"lora_rank": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}),
        ({"lora_r": 4, "lora_target_modules": ["all-linear"]},
         {"lora_rank": 4, "lora_alpha": 32, "target_modules": "all-linear"}),
    ],
)  # fmt: skip
def test_an_adapter_stays_an_adapter(given: dict[str, Any], adapter: dict[str, Any]) -> None:
    settings, notices = converted(**given)
    assert value_at(settings, "model.lora_configs") == [adapter]
    resolve(build_config(settings))
    assert any("all linear layers" in line for line in notices) == ("target_modules" not in adapter)
    assert any("without use_peft" in line for line in notices) == ("use_peft" not in given)


def test_an_adapter_that_is_switched_off_is_not_trained() -> None:
    settings, notices = converted(use_peft=False, lora_r=8)
    assert value_at(settings, "model.lora_configs") is None and any("use_peft false" in line for line in notices)


def test_known_keys_are_those_of_trl_once() -> None:
    """No key is listed as converted and as one without equivalent."""
    converted_keys = [key for key, _ in _KEYS]
    assert len(converted_keys) == len(set(converted_keys))
    assert not {*_WITHOUT_EQUIVALENT.split()} & {*converted_keys, *_READ.split()}
