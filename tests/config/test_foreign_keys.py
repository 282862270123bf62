"""Keys and names of Trinity-RFT: each kind of rule by a small file, and the table as a whole."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.algorithms.advantages.registry import ADVANTAGES as ADVANTAGES_HERE
from rft_platform.algorithms.common.registry import Registry
from rft_platform.algorithms.losses.registry import LOSSES as LOSSES_HERE
from rft_platform.algorithms.token_advantages.registry import TOKEN_ADVANTAGES
from rft_platform.common.errors import UserError
from rft_platform.config.allowed_changes import changed_keys
from rft_platform.config.foreign.convert import convert
from rft_platform.config.foreign.defaults import write_defaults
from rft_platform.config.foreign.keys import KEYS
from rft_platform.config.foreign.names import (
    ADVANTAGES,
    LOSSES,
    REFUSED_REWARDS,
    REFUSED_WORKFLOWS,
    REWARDS,
    WORKFLOWS,
)
from rft_platform.config.foreign.treatments import Moved, Noted, Refused, find, value_at
from rft_platform.config.load import build_config, load_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.judging.execution.compose import MODEL_JUDGES, RULES, build_judge
from rft_platform.rollout.workflow import BUILT_IN
from tests.support.findings import warnings_of

TASKSET = "buffer.explorer_input.taskset"


def nested(**keys: Any) -> dict[str, Any]:
    """A mapping with ``section__key=value`` put in."""
    data: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, last = key.split("__")
        section = data
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return data


def converted(**keys: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    return convert(nested(**keys), "file.yaml")


def refusal(**keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        converted(**keys)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("file.yaml: ")
    return line


def with_taskset(**keys: Any) -> dict[str, Any]:
    return {f"buffer__explorer_input__taskset__{key}": value for key, value in {"path": "tasks.jsonl", **keys}.items()}


def test_a_key_with_another_name_moves() -> None:
    data, notices = converted(
        model__enable_thinking=True, trainer__critic_warmup=5, trainer__param_offload=True, trainer__save_interval=0
    )
    assert value_at(data, "explorer.rollout_model.enable_thinking") is True
    assert value_at(data, "algorithm.critic.warmup_steps") == 5
    assert data["trainer"] == {"cpu_offload": True}
    assert notices == ()


def test_auxiliary_models_think_as_the_model_does_unless_they_have_their_own_setting() -> None:
    models = [{"model_path": "a"}, {"model_path": "b", "enable_thinking": True}]
    data, _ = converted(model__enable_thinking=False, explorer__auxiliary_models=models)
    assert [model["enable_thinking"] for model in data["explorer"]["auxiliary_models"]] == [False, True]
    data, _ = converted(explorer__rollout_model__enable_thinking=False, explorer__auxiliary_models=models)
    assert "enable_thinking" not in data["explorer"]["auxiliary_models"][0]


def test_options_of_an_engine_are_those_of_the_policys_engine_only() -> None:
    options = {"max_num_seqs": 8}
    data, _ = converted(explorer__rollout_model__extra_engine_args=options)
    assert data["engine"]["vllm_args"] == options
    line = refusal(explorer__auxiliary_models=[{"model_path": "a", "extra_engine_args": options}])
    assert "explorer.auxiliary_models[0].extra_engine_args" in line and "engine.vllm_args" in line
    assert converted(explorer__auxiliary_models=[{"model_path": "a", "extra_engine_args": {}}])[1] == ()


def test_runners_of_all_engines_are_not_those_of_one() -> None:
    data, (notice,) = converted(explorer__runner_num=32, explorer__rollout_model__engine_num=4)
    assert "explorer.runner_num has no effect here: explorer.runner_per_model is the number" in notice
    assert "runner_per_model" not in data["explorer"]


def test_a_setting_with_two_values_is_refused() -> None:
    line = refusal(model__enable_thinking=True, explorer__rollout_model__enable_thinking=False)
    assert "model.enable_thinking and explorer.rollout_model.enable_thinking are the same setting" in line


def test_the_notice_of_a_key_without_effect_names_its_replacement() -> None:
    _, notices = converted(trainer__use_dynamic_bsz=False, explorer__rollout_model__enable_chunked_prefill=True)
    assert notices == (
        "trainer.use_dynamic_bsz has no effect here: rows are always packed up to trainer.max_token_len_per_gpu",
    )


def test_a_key_with_an_unsupported_value_is_refused_with_the_reason() -> None:
    assert "model.repetition_penalty 1.1: it changes the distribution" in refusal(model__repetition_penalty=1.1)
    assert converted(model__repetition_penalty=1.0)[1] == ()
    entry = {"path": "tasks.jsonl", "format": {"image_key": "images"}}
    assert "eval_tasksets[0].format.image_key images: models and tasks are text" in refusal(
        buffer__explorer_input__eval_tasksets=[entry]
    )


def test_an_adapter_to_start_from_is_refused_and_its_name_has_no_effect() -> None:
    data, (notice,) = converted(model__lora_configs=[{"name": "mine", "path": "", "lora_rank": 8}])
    assert data["model"]["lora_configs"] == [{"lora_rank": 8}] and "needs no name" in notice
    message = refusal(model__lora_configs=[{"path": "/adapters/first"}])
    assert "model.lora_configs[0].path /adapters/first: a run starts with a new adapter: merge" in message


def test_the_key_of_a_foreign_service_is_refused_and_not_shown() -> None:
    model = {"name": "judge", "base_url": "https://host/v1", "api_key": "abc-123"}
    line = refusal(explorer__auxiliary_models=[model])
    assert "auxiliary_models[0].api_key: name an environment variable with the key in api_key_env" in line
    assert "abc-123" not in line
    assert converted(explorer__auxiliary_models=[{**model, "api_key": "EMPTY"}])[1] == ()


def test_the_default_workflow_and_reward_are_those_of_every_taskset() -> None:
    held_out = [{"path": "held.jsonl", "repeat_times": 4}, {"path": "b", "workflow": "x:y"}]
    data, _ = converted(
        **with_taskset(),
        buffer__explorer_input__eval_tasksets=held_out,
        buffer__explorer_input__default_workflow_type="math_boxed_workflow",
        buffer__explorer_input__default_reward_fn_type="math_boxed_reward",
    )  # fmt: skip
    inputs = data["buffer"]["explorer_input"]
    assert (inputs["taskset"]["workflow"], inputs["taskset"]["judge"]) == ("single_turn", "math")
    assert "boxed" in inputs["taskset"]["format"]["system_prompt"]
    held, own = inputs["eval_tasksets"]
    assert (held["workflow"], held["rollout_args"]) == ("single_turn", {"n": 4})
    assert own["workflow"] == "x:y"


def test_a_caller_with_own_functions_needs_no_workflow_of_the_file() -> None:
    data, notices = convert(nested(**with_taskset(default_workflow_type="webshop_workflow")), "f", own_functions=True)
    assert (value_at(data, TASKSET), notices) == ({"path": "tasks.jsonl"}, ())


def test_a_dotted_class_is_a_reference() -> None:
    data, _ = converted(**with_taskset(default_workflow_type="my.module.MyWorkflow"))
    assert value_at(data, f"{TASKSET}.workflow") == "my.module:MyWorkflow"
    data, _ = converted(**with_taskset(workflow="agent.py"))
    assert value_at(data, f"{TASKSET}.workflow") == "agent.py", "a file, whose function is missing"


def test_an_environment_that_is_not_here_is_refused_by_name() -> None:
    line = refusal(**with_taskset(default_workflow_type="webshop_workflow"))
    assert f"{TASKSET}.workflow webshop_workflow: the environment WebShop is no part of the platform" in line


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_every_known_workflow_has_a_built_in_one(name: str) -> None:
    known = WORKFLOWS[name]
    assert known.workflow in BUILT_IN
    data, notices = converted(**with_taskset(workflow=name), explorer__auxiliary_models=[{"model_path": "owner/large"}])
    assert (known.note is None) == (not any(name in notice for notice in notices))
    config = build_config(data)
    assert config.buffer.explorer_input.taskset is not None


def test_every_known_reward_is_a_judge() -> None:
    for judge in REWARDS.values():
        names = [judge] if isinstance(judge, str) else [part["judge"] for part in judge]
        assert all(name in RULES or name in MODEL_JUDGES for name in names)
    assert not REWARDS.keys() & REFUSED_REWARDS.keys() and not WORKFLOWS.keys() & REFUSED_WORKFLOWS.keys()


@pytest.mark.parametrize(
    "given", [{"workflow": "math_workflow"}, {"reward_fn_type": "math_reward"}, {"reward_fn_type": "format_reward"}]
)
def test_the_form_of_a_text_changes_the_reward_by_as_much_as_in_the_other_system(given: dict[str, str]) -> None:
    data, notices = converted(**with_taskset(**given))
    form = value_at(data, f"{TASKSET}.judge")[-1]
    assert (form["judge"], form["weight"]) == ("tags", 0.2)
    assert f"{TASKSET}.judge: the form of the text adds 0.2 or 0, and 0.1 or -0.1 in Trinity-RFT" in str(notices)
    own = build_config(data).model_dump()["buffer"]["explorer_input"]["taskset"]["judge"]  # not the same objects
    assert "Trinity-RFT" not in str(converted(**with_taskset(judge=own))[1])


@pytest.mark.parametrize(("arguments", "weight"), [({}, 0.1), ({"format_score_coef": 0.3}, 0.3)])
def test_missing_thoughts_cost_the_coefficient_of_the_format(arguments: dict[str, float], weight: float) -> None:
    keys = {"workflow": "math_boxed_workflow", "workflow_args": {"with_think": True, **arguments}}
    data, notices = converted(**with_taskset(**keys))
    config = build_config(data).buffer.explorer_input.taskset
    assert config is not None and isinstance(config.judge, list)
    right, thoughts = config.judge
    assert (right.judge, right.weight, thoughts.judge, thoughts.weight) == ("math", 1.0, "tags", weight)
    assert f"{TASKSET}.workflow_args with_think and format_score_coef" in str(notices)
    assert "no effect" not in str(notices)
    assert build_judge(config.judge).name == f"1 math + {weight} tags"
    others: tuple[dict[str, Any], ...] = (
        {"default_reward_fn_type": "math_dapo_reward"},
        {"workflow_args": {"with_think": False}},
        {"workflow": "math_eval_workflow"},  # it rewards the answer alone
    )
    for other in others:
        assert value_at(converted(**with_taskset(**keys | other))[0], f"{TASKSET}.judge") == "math"


def test_the_over_long_penalty_of_a_reward_is_a_filter() -> None:
    arguments = {
        "enable_overlong_penalty": True, "penalty_factor": 0.5, "max_response_length": 200, "cache_length": 50,
    }  # fmt: skip
    data, _ = converted(**with_taskset(default_reward_fn_type="math_dapo_reward", reward_fn_args=arguments))
    assert data["algorithm"]["filters"]["overlong"] == {"weight": 0.5, "max_length": 200, "cache_length": 50}


def test_a_reward_of_another_project_is_refused_unless_it_is_known() -> None:
    line = refusal(**with_taskset(default_reward_fn_type="rm_gallery_reward"))
    assert "rm_gallery_reward: it needs another project's graders" in line
    data, _ = converted(
        **with_taskset(default_reward_fn_type="rm_gallery_reward", reward_fn_args={"reward_name": "math_verify_reward"})
    )
    assert value_at(data, f"{TASKSET}.judge") == "math"


def test_a_judge_that_asks_a_model_gets_the_auxiliary_model() -> None:
    assert "explorer.auxiliary_models is empty: add one" in refusal(**with_taskset(workflow="math_ruler_workflow"))
    data, _ = converted(
        **with_taskset(workflow="math_ruler_workflow"), explorer__auxiliary_models=[{"model_path": "owner/large"}]
    )
    assert value_at(data, f"{TASKSET}.judge") == "ranking"
    assert value_at(data, f"{TASKSET}.judge_args.model") == data["explorer"]["auxiliary_models"][0]["name"]


def test_held_out_tasks_of_ruler_are_compared_with_the_answer() -> None:
    data, notices = converted(
        buffer__explorer_input__default_workflow_type="math_ruler_workflow",
        buffer__explorer_input__eval_tasksets=[{"path": "b.jsonl"}, {"path": "c.jsonl", "judge": "countdown_reward"}],
        **with_taskset(),
        explorer__auxiliary_models=[{"model_path": "owner/large"}],
    )
    inputs = build_config(data).buffer.explorer_input
    assert inputs.taskset is not None and inputs.taskset.judge == "ranking"
    assert [taskset.judge for taskset in inputs.eval_tasksets] == ["math", "countdown"]
    assert inputs.eval_tasksets[0].judge_args == {} and "eval_tasksets get the judge math" in str(notices)


def test_arguments_of_the_loss_and_the_advantage_have_other_names() -> None:
    data, notices = converted(
        algorithm__policy_loss_fn_args={"clip_range": 0.2, "clip_range_high": 0.28, "ppo_mini_batch_size": 8},
        algorithm__advantage_fn_args={"epsilon": 1e-5, "std_threshold": 0.0001},
    )
    assert data["algorithm"]["policy_loss_fn_args"] == {"clip_low": 0.2, "clip_high": 0.28}
    assert data["algorithm"]["advantage_fn_args"] == {"eps": 1e-5}
    assert data["algorithm"]["filters"] == {"zero_variance": True}
    assert len(notices) == 2
    resolve(build_config(data))


@pytest.mark.parametrize(
    ("name", "given", "loss", "options"),
    [
        ("clipb", {"mu": 2.5, "epsilon": 1e-5}, "clip_b", {"mu": 2.5}),
        ("clipv", {"mu": 8.5, "max_frac": 0.01}, "clip_v", {"mu": 8.5, "max_share": 0.01}),
        ("clipv", None, "clip_v", {}),
    ],
)
def test_an_advantage_that_leaves_out_tokens_is_a_loss(
    name: str, given: dict[str, Any] | None, loss: str, options: dict[str, float]
) -> None:
    data, (notice,) = converted(
        algorithm__advantage_fn=name,
        algorithm__advantage_fn_args=given,
        algorithm__policy_loss_fn_args={"clip_range_high": 0.3},
    )
    run = resolve(build_config(data))
    assert run.spec.policy_loss == loss and run.algorithm.advantage == "grpo"
    assert run.spec.policy_loss_args == {"clip_high": 0.3, **options}
    assert notice == f"algorithm.advantage_fn {name} is policy_loss_fn {loss} with advantage_fn grpo here"
    with pytest.raises(UserError, match=f"advantage_fn {name} with policy_loss_fn sapo: .*remove policy_loss_fn"):
        converted(algorithm__advantage_fn=name, algorithm__policy_loss_fn="sapo")


@pytest.mark.parametrize("key", ["kl_loss_fn", "kl_penalty_fn"])
def test_the_function_none_switches_a_kl_term_off(key: str) -> None:
    data, (notice,) = converted(**{f"algorithm__{key}": "none", f"algorithm__{key}_args": {"kl_coef": 0.1}})
    algorithm = build_config(data).algorithm
    assert algorithm.beta == 0 and algorithm.kl_penalty_fn_args.kl_coef == 0
    assert notice.startswith(f"algorithm.{key} none: ")
    assert converted(**{f"algorithm__{key}": "none"})[1] == ()
    kept, _ = converted(**{f"algorithm__{key}": "low_var_kl", f"algorithm__{key}_args": {"kl_coef": 0.1}})
    assert kept["algorithm"] == {key: "k3", f"{key}_args": {"kl_coef": 0.1}}


def test_an_adaptive_kl_penalty_has_a_target() -> None:
    adaptive = {"adaptive": True, "kl_coef": 0.1, "target_kl": 0.02, "horizon": 500}
    data, (notice,) = converted(algorithm__kl_penalty_fn="k1", algorithm__kl_penalty_fn_args=adaptive)
    assert data["algorithm"]["kl_penalty_fn_args"] == {"kl_coef": 0.1, "target": 0.02}
    assert "kl_penalty_fn_args.horizon 500 has no effect here" in notice
    own = {"kl_coef": 0.1, "target": 0.02, "horizon": 500}
    assert converted(algorithm__kl_penalty_fn_args=own)[0]["algorithm"]["kl_penalty_fn_args"] == own
    message = refusal(algorithm__kl_penalty_fn_args={"adaptive": True})
    assert "algorithm.kl_penalty_fn_args.adaptive: target_kl is not set: give" in message


@pytest.mark.parametrize("key", ["kl_loss_fn", "kl_penalty_fn"])
@pytest.mark.parametrize("function", ["k2", "none"])
def test_a_kl_coefficient_that_does_not_adapt_has_no_target(key: str, function: str) -> None:
    given = {"adaptive": False, "target_kl": None, "horizon": None}
    data, notices = converted(**{f"algorithm__{key}": function, f"algorithm__{key}_args": given})
    assert data["algorithm"][f"{key}_args"] == {} and notices == ()


def test_the_weight_of_a_kl_term_in_the_loss_is_constant() -> None:
    given = {"adaptive": True, "kl_coef": 0.1, "target_kl": 0.02, "horizon": 500}
    data, (notice,) = converted(algorithm__kl_loss_fn_args=given)
    assert data["algorithm"]["kl_loss_fn_args"] == {"kl_coef": 0.1}
    assert "kl_loss_fn_args.adaptive has no effect here" in notice


def test_a_kl_term_that_a_foreign_file_does_not_mention_is_reported() -> None:
    foreign = {"algorithm__algorithm_type": "grpo", "trainer__use_dynamic_bsz": True}
    for mixed in ("mix", "mix_chord"):
        assert f"{mixed} has no KL term here" in str(converted(**foreign | {"algorithm__algorithm_type": mixed})[1])
    data, (notice,) = converted(**foreign)
    assert "grpo has no KL term here, and one of weight 0.001 in Trinity-RFT: set it to 0.001" in notice
    assert build_config(data).algorithm.beta == 0
    assert converted(algorithm__algorithm_type="grpo")[1] == ()  # a file of this platform
    for said in ({"algorithm__kl_loss_fn": "none"}, {"algorithm__kl_loss_fn_args": {"kl_coef": 0.0}}):
        assert converted(**foreign, **said)[1] == ()
    assert converted(**foreign | {"algorithm__algorithm_type": "sft"})[1] == ()


def loaded(tmp_path: Path, **keys: Any) -> RftConfig:
    file = tmp_path / "file.yaml"
    file.write_text(yaml.safe_dump(nested(model__model_path="m", **keys)))
    return load_config(file)


def test_what_a_foreign_file_leaves_out_has_the_default_of_the_other_system(tmp_path: Path) -> None:
    foreign = {"trainer__use_dynamic_bsz": True, **with_taskset()}
    config = loaded(tmp_path, **foreign, stages=[*stages(algorithm__optimizer__lr=1e-5)[:1], {}])
    form = config.buffer.explorer_input.taskset.format  # type: ignore[union-attr]
    assert (config.algorithm.algorithm_type, config.algorithm.optimizer.weight_decay) == ("ppo", 0.01)
    assert (config.buffer.batch_size, form.prompt_key, form.response_key) == (1, "prompt", "response")
    assert config.warm_start is not None
    assert (config.warm_start.optimizer.lr, config.warm_start.optimizer.weight_decay) == (1e-5, 0.01)
    said = "algorithm_type is not set: it is ppo, the default of Trinity-RFT, taken because the file has stages[0]."
    assert said in str(config.notices)
    assert sum("is not set: it is" in line for line in config.notices) == 6


@pytest.mark.parametrize("adapter", [{"name": "l"}, {"path": None}, {"name": None}])
def test_the_name_of_an_adapter_and_empty_keys_are_no_signs_of_a_foreign_file(
    tmp_path: Path, adapter: dict[str, Any]
) -> None:
    keys = {"model__lora_configs": [{"lora_rank": 8, **adapter}], "trainer__grad_clip": None, **with_taskset()}
    taskset = loaded(tmp_path, **keys).buffer.explorer_input.taskset
    foreign = loaded(tmp_path, **keys, trainer__use_dynamic_bsz=True).buffer.explorer_input.taskset
    assert taskset is not None and taskset.format.prompt_key == "question"
    assert foreign is not None and foreign.format.prompt_key == "prompt"


def test_the_notice_of_a_default_names_the_key_or_the_value_that_another_system_has(tmp_path: Path) -> None:
    assert "taken because the file has trainer.use_dynamic_bsz'" in str(
        loaded(tmp_path, trainer__use_dynamic_bsz=True).notices
    )
    named = loaded(tmp_path, **with_taskset(workflow="math_workflow")).notices
    assert "taken because the file has buffer.explorer_input.taskset.workflow math_workflow'" in str(named)


def test_what_a_foreign_file_sets_is_kept(tmp_path: Path) -> None:
    foreign = {"trainer__use_dynamic_bsz": True, "algorithm__kl_loss_fn": "none"}
    given = {
        "algorithm__algorithm_type": "rloo", "algorithm__optimizer__weight_decay": 0.0, "buffer__batch_size": 4,
        **with_taskset(format={"prompt_key": "q", "response_key": None}),
    }  # fmt: skip
    config = loaded(tmp_path, **foreign, **given)
    assert (config.algorithm.algorithm_type, config.algorithm.optimizer.weight_decay) == ("rloo", 0.0)
    assert config.buffer.batch_size == 4 and config.notices == ()
    rows = with_taskset(workflow="frozen_lake_workflow")
    taskset = loaded(tmp_path, **foreign, **rows).buffer.explorer_input.taskset
    assert taskset is not None and taskset.format.prompt_key is None
    own = loaded(tmp_path, **with_taskset())
    assert (own.algorithm.algorithm_type, own.buffer.batch_size, own.notices) == ("grpo", 32, ())


def test_a_foreign_file_in_another_mode_has_the_same_settings(tmp_path: Path) -> None:
    foreign = {"trainer__use_dynamic_bsz": True, **with_taskset()}
    both, *others = (loaded(tmp_path, mode=mode, **foreign) for mode in ("both", "bench", "explore", "train"))
    for config in others:
        assert changed_keys(both, config).keys() == {"mode"} and config.notices == both.notices


def test_a_value_of_another_type_is_not_taken_for_a_known_one() -> None:
    for given in ({"trainer__save_interval": False}, {"buffer__train_batch_size": False}):
        with pytest.raises(UserError, match="input should be a number, not true or false"):
            build_config(converted(**given)[0])


def test_arguments_of_user_losses_and_advantages_keep_their_names() -> None:
    loss = {"mu": 0.2, "train_batch_size_expert": 4, "clip_range": 0.1, "clip_ratio_c": 3, "loss_agg_mode": "mine"}
    advantage = {"epsilon": 0.1, "std_threshold": 0.2, "rank_penalty": 0.3, "std_cal_level": "group"}
    for name in ("grpo", "mix"):
        data, notices = converted(
            algorithm__algorithm_type=name,
            algorithm__policy_loss_fn="own_loss",
            algorithm__policy_loss_fn_args=dict(loss),
            algorithm__advantage_fn="own_advantage",
            algorithm__advantage_fn_args=dict(advantage),
        )
        assert data["algorithm"]["policy_loss_fn_args"] == loss
        assert data["algorithm"]["advantage_fn_args"] == advantage
        assert notices == ()
    data, _ = converted(algorithm__policy_loss_fn_args={"mu": 0.2})  # no argument of ppo: the choice refuses it
    assert data["algorithm"]["policy_loss_fn_args"] == {"mu": 0.2}


def test_the_platforms_losses_and_advantages_are_registered_by_name() -> None:
    def own(registry: Registry[Any]) -> set[str]:
        return {name for name in registry.names() if registry._modules[name].startswith(f"{registry._package}.")}

    assert own(LOSSES_HERE) == LOSSES
    assert own(ADVANTAGES_HERE) | own(TOKEN_ADVANTAGES) == ADVANTAGES


def test_held_out_tasksets_of_the_buffer_are_converted_as_those_of_the_explorer() -> None:
    entry = {"path": "held.jsonl", "repeat_times": 4, "reward_fn_type": "math_boxed_reward"}
    kinds = {
        "buffer__explorer_input__default_workflow_type": "math_boxed_workflow",
        "buffer__explorer_input__default_reward_fn_type": "countdown_reward",
    }
    (of_buffer, notices) = converted(buffer__eval_tasksets=[entry, {"path": "more.jsonl"}], **kinds)
    of_explorer = converted(buffer__explorer_input__eval_tasksets=[entry, {"path": "more.jsonl"}], **kinds)
    assert (of_buffer, notices) == of_explorer
    first, second = build_config(of_buffer).buffer.explorer_input.eval_tasksets
    assert (first.workflow, first.judge, first.rollout_args.n) == ("single_turn", "math", 4)
    assert (second.workflow, second.judge) == ("single_turn", "countdown")
    line = refusal(buffer__eval_tasksets=[entry], buffer__explorer_input__eval_tasksets=[])
    assert "buffer.eval_tasksets and buffer.explorer_input.eval_tasksets are the same setting" in line


def test_a_share_of_warm_up_steps_needs_the_length() -> None:
    given = {"algorithm__optimizer__lr_warmup_steps_ratio": 0.1}
    assert converted(**given, trainer__total_steps=50)[0]["algorithm"]["optimizer"] == {"lr_warmup_steps": 5}
    assert "the number of steps is not set" in refusal(**given)


def test_explore_batches_are_no_optimiser_steps_of_a_warm_up() -> None:
    given = {"algorithm__optimizer__lr_warmup_steps_ratio": 0.1, "buffer__total_steps": 50}
    assert "the number of steps is not set" in refusal(**given)
    store = "buffer__trainer_input__experience_buffer__storage_type"
    assert "the number of steps is not set" in refusal(**given, **{store: "sql"}, mode="train")
    offline, _ = converted(**given, **{store: "file"}, mode="train")
    assert offline["algorithm"]["optimizer"] == {"lr_warmup_steps": 5}


CRITIC: dict[str, Any] = {
    "optim": {"lr": 3e-5, "weight_decay": 0.1}, "cliprange_value": 0.5, "ppo_max_token_len_per_gpu": 20480,
}  # fmt: skip


def test_the_critics_settings_of_another_trainer_are_taken_over() -> None:
    foreign = {"critic": CRITIC, "trainer": {"max_critic_ckpt_to_keep": 5}, "actor_rollout_ref": {"actor": {}}}
    converted, notices = convert(
        {"algorithm": {"algorithm_type": "ppo", "kl_loss_fn": "none"}, "trainer": {"trainer_config": foreign}}, "a.yaml"
    )
    config = RftConfig.model_validate(converted)
    critic = config.algorithm.critic
    assert (critic.lr, critic.weight_decay, critic.value_clip) == (3e-5, 0.1, 0.5)
    because = "has no effect here, since it configures another framework's trainer"
    assert notices == (
        f"trainer.trainer_config.critic {because}: ppo_max_token_len_per_gpu",
        f"trainer.trainer_config.trainer {because}: max_critic_ckpt_to_keep",
    )


ACTOR: dict[str, Any] = {
    "optim": {
        "lr": 5e-6, "lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.1, "warmup_style": "cosine", "min_lr_ratio": 0.1,
        "betas": [0.9, 0.95], "weight_decay": 0.1,
    },
    "grad_clip": 0.5,
    "use_dynamic_bsz": True,
}  # fmt: skip
OF_ACTOR = "trainer.trainer_config.actor_rollout_ref.actor.optim"


def test_the_policys_optimizer_of_another_trainer_is_taken_over() -> None:
    foreign = {"trainer__trainer_config__actor_rollout_ref__actor": ACTOR, "algorithm__kl_loss_fn": "none"}
    data, notices = converted(**foreign, trainer__total_steps=50)
    optimizer = build_config(data).algorithm.optimizer
    assert (optimizer.lr, optimizer.lr_warmup_steps, optimizer.lr_scheduler_type) == (5e-6, 5, "cosine")
    assert (optimizer.betas, optimizer.weight_decay, optimizer.clip_grad) == ((0.9, 0.95), 0.1, 0.5)
    said, unused = notices
    assert said == f"{OF_ACTOR}.lr_warmup_steps_ratio 0.1 of 50 steps is lr_warmup_steps 5"
    assert unused.endswith(": actor.optim.min_lr_ratio, actor.use_dynamic_bsz")
    assert f"{OF_ACTOR}.lr_warmup_steps_ratio 0.1: the number of steps is not set" in refusal(**foreign)


def test_a_file_with_an_optimizer_of_the_algorithm_keeps_it_as_it_is() -> None:
    data, notices = converted(
        algorithm={"kl_loss_fn": "none", "optimizer": {"lr": 1e-5}},
        trainer__trainer_config__actor_rollout_ref__actor=ACTOR,
    )
    assert data["algorithm"]["optimizer"] == {"lr": 1e-5}
    assert "actor.optim.lr, actor.optim.lr_warmup_steps, actor.optim.lr_warmup_steps_ratio" in str(notices)


def test_the_clip_of_the_trainer_comes_before_that_of_another_trainer() -> None:
    data, notices = converted(
        algorithm__kl_loss_fn="none", trainer__grad_clip=1.0, trainer__trainer_config__actor_rollout_ref__actor=ACTOR,
        trainer__total_steps=50,
    )  # fmt: skip
    assert (data["algorithm"]["optimizer"]["clip_grad"], data["algorithm"]["optimizer"]["lr"]) == (1.0, 5e-6)
    assert "actor.grad_clip" in str(notices)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_warm_start_takes_over_the_optimizer_of_another_trainer(clip: float | None) -> None:
    staged = stages()
    staged[0]["trainer"] = {
        "total_steps": 20, "grad_clip": clip, "trainer_config": {"actor_rollout_ref": {"actor": ACTOR}}
    }  # fmt: skip
    data, notices = convert({"stages": staged}, "a.yaml")
    optimizer = data["warm_start"]["optimizer"]
    assert (optimizer["lr"], optimizer["lr_warmup_steps"], optimizer["weight_decay"]) == (5e-6, 2, 0.1)
    assert optimizer["clip_grad"] == (clip or 0.5)
    assert f"stages[0].{OF_ACTOR}.weight_decay" not in str(notices)


def test_a_stage_with_an_optimizer_of_its_algorithm_keeps_it_as_it_is() -> None:
    staged = stages(algorithm__optimizer={"lr": 1e-5, "warmup_style": "constant"})
    staged[0]["trainer"] = {"total_steps": 20, "trainer_config": {"actor_rollout_ref": {"actor": ACTOR}}}
    data, notices = convert({"stages": staged}, "a.yaml")
    assert data["warm_start"]["optimizer"] == {"lr": 1e-5, "lr_scheduler_type": "constant"}
    assert f"stages[0].{OF_ACTOR}.lr has no effect here" in str(notices)


def test_critic_settings_without_a_critic_are_reported() -> None:
    _, (line,) = convert(nested(algorithm__algorithm_type="grpo", trainer__trainer_config__critic=CRITIC), "a.yaml")
    assert line.endswith(": optim.lr, optim.weight_decay, cliprange_value, ppo_max_token_len_per_gpu")


@pytest.mark.parametrize(
    "key", ["enable_openai_api", "enable_openai_client", "enable_history", "enable_auto_tool_choice"]
)
def test_a_switch_that_is_always_on_is_accepted(key: str) -> None:
    _, (line,) = convert({"explorer": {"rollout_model": {key: False}}}, "a.yaml")
    assert line.startswith(f"explorer.rollout_model.{key} has no effect here")
    assert convert({"explorer": {"rollout_model": {key: True}}}, "a.yaml") == ({"explorer": {"rollout_model": {}}}, ())


def test_the_clip_of_the_gradient_is_a_setting_of_the_optimizer() -> None:
    assert convert({"trainer": {"grad_clip": 0.5}}, "a.yaml")[0]["algorithm"] == {"optimizer": {"clip_grad": 0.5}}
    with pytest.raises(UserError, match=r"trainer.grad_clip and algorithm.optimizer.clip_grad are the same setting"):
        convert({"trainer": {"grad_clip": 0.5}, "algorithm": {"optimizer": {"clip_grad": 1.0}}}, "a.yaml")


def test_a_critics_learning_rate_with_two_values_is_refused() -> None:
    section = {"algorithm_type": "ppo", "critic": {"lr": 1e-4}}
    with pytest.raises(UserError, match=r"trainer_config.critic.optim.lr and algorithm.critic.lr are the same setting"):
        convert({"algorithm": section, "trainer": {"trainer_config": {"critic": CRITIC}}}, "a.yaml")


def test_the_teacher_is_the_first_auxiliary_model() -> None:
    data, (notice,) = converted(
        algorithm__algorithm_type="on_policy_distill", explorer__auxiliary_models=[{"model_path": "owner/teacher"}]
    )
    assert data["algorithm"]["teacher_model_path"] == "owner/teacher" and data["explorer"]["auxiliary_models"] == []
    assert "is the teacher" in notice


@pytest.mark.parametrize(
    ("steps", "experts"),
    [
        ((200, 400), {"warmup_steps": 200, "decay_steps": 400, "weight": 0.5, "final_weight": 0.02}),
        ((0, 0), {"weight": 0.02}),
    ],
)
def test_mix_chord_is_mix_with_a_schedule(steps: tuple[int, int], experts: dict[str, Any]) -> None:
    data, notices = converted(
        **with_taskset(),
        algorithm__algorithm_type="mix_chord",
        algorithm__policy_loss_fn_args={
            "mu_warmup_steps": steps[0], "mu_decay_steps": steps[1], "mu_peak": 0.5, "mu_valley": 0.02,
            "enable_phi_function": True,
        },
        buffer__trainer_input__auxiliary_buffers={"sft": {"path": "shown.jsonl"}},
    )  # fmt: skip
    assert data["algorithm"]["algorithm_type"] == "mix"
    assert data["algorithm"]["experts"] == {"path": "shown.jsonl", **experts}
    assert data["algorithm"]["policy_loss_fn_args"] == {"phi": True}
    assert any("mix_chord is mix here" in notice for notice in notices)
    build_config(data)


def test_mix_chord_has_its_defaults() -> None:
    data, _ = converted(
        **with_taskset(),
        algorithm__algorithm_type="mix_chord",
        buffer__trainer_input__auxiliary_buffers={"sft": {"path": "shown.jsonl"}},
    )
    assert data["algorithm"]["experts"] == {"path": "shown.jsonl", "weight": 0.1}
    assert data["algorithm"]["policy_loss_fn_args"] == {"phi": True}


def test_the_auxiliary_buffer_holds_the_demonstrations_of_mix() -> None:
    buffers = {"sft": {"path": "shown.jsonl", "storage_type": "file", "format": {"prompt_key": "problem"}}}
    data, notices = converted(
        algorithm__algorithm_type="mix", buffer__train_batch_size=320, algorithm__policy_loss_fn_args={"mu": 0.2},
        algorithm__sample_strategy_args={"expert_data_ratio": 0.2}, buffer__trainer_input__auxiliary_buffers=buffers,
    )  # fmt: skip
    expected = {"path": "shown.jsonl", "format": {"prompt_key": "problem"}, "weight": 0.2, "batch_size": 64}
    assert data["algorithm"]["experts"] == expected
    assert data["buffer"]["train_batch_size"] == 256 and "256 experiences and 64 demonstrations" in notices[0]
    assert "no other algorithm reads" in refusal(buffer__trainer_input__auxiliary_buffers=buffers)


def test_tinker_is_replaced_by_an_adapter() -> None:
    data, (notice,) = converted(model__tinker={"enable": True, "rank": 8})
    assert data["model"] == {"lora_configs": [{"lora_rank": 8}]} and "a paid service" in notice
    assert converted(model__tinker={"enable": False}) == ({"model": {}}, ())
    assert "remove model.tinker" in refusal(model__tinker={"enable": True, "base_url": "https://host"})


def test_a_stage_of_sft_is_the_warm_start() -> None:
    data_of_sft = {"experience_buffer": {"path": "a.jsonl"}}
    first = {
        "stage_name": "warm",
        "mode": "train",
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-5}},
        "buffer": {"train_batch_size": 16, "total_epochs": 2, "trainer_input": data_of_sft},
    }  # fmt: skip
    last = {"stage_name": "rl", "mode": "both", "algorithm": {"algorithm_type": "grpo", "repeat_times": 4}}
    data, (notice, unsaid) = converted(algorithm__algorithm_type="sft", stages=[first, last])
    warm = {"path": "a.jsonl", "batch_size": 16, "epochs": 2, "optimizer": {"lr": 1e-5}}
    assert data["warm_start"] == warm and data["mode"] == "both" and data["algorithm"] == last["algorithm"]
    assert notice == "stages: warm is the warm start (round 0) of the project, and rl its rounds"
    assert "grpo has no KL term here" in unsaid
    assert "run each further one as its own project" in refusal(stages=[last, last])
    assert converted(stages=[last])[0]["algorithm"] == last["algorithm"]


def stages(**keys: Any) -> list[dict[str, Any]]:
    """A stage of sft with ``keys``, and one of grpo."""
    first = {"algorithm__algorithm_type": "sft", "buffer__trainer_input__experience_buffer__path": "a.jsonl", **keys}
    return [nested(**first), nested(algorithm__algorithm_type="grpo")]


def test_the_optimizer_of_a_stage_of_sft_has_the_keys_of_an_algorithm() -> None:
    optimizer = {"lr_warmup_steps_ratio": 0.1, "warmup_style": "cosine", "min_lr_ratio": 0.1}
    given = {"algorithm__optimizer": optimizer, "trainer__grad_clip": 0.5}
    data, notices = converted(trainer__total_steps=90, stages=stages(**given, trainer__total_steps=50))
    expected = {"lr_warmup_steps": 5, "lr_scheduler_type": "cosine", "clip_grad": 0.5}
    assert data["warm_start"] == {"path": "a.jsonl", "steps": 50, "optimizer": expected}
    assert any(line.startswith("stages[0].algorithm.optimizer.min_lr_ratio has no effect") for line in notices)
    assert "stages[0].algorithm.optimizer.optimizer_type sgd" in refusal(
        stages=stages(algorithm__optimizer={"optimizer_type": "sgd"})
    )


def test_a_stage_without_a_section_has_that_of_the_file() -> None:
    data, _ = converted(trainer__total_steps=90, stages=stages())
    assert data["warm_start"] == {"path": "a.jsonl", "steps": 90}


def test_each_dropped_key_of_an_sft_stage_gives_a_notice() -> None:
    form = "buffer__trainer_input__experience_buffer__format__"
    _, notices = converted(stages=stages(trainer__save_interval=3, **{f"{form}messages_key": "messages"}))
    assert [line.partition(" has")[0] for line in notices if "no effect" in line] == ["stages[0].trainer.save_interval"]
    assert "rename the column to messages" in refusal(stages=stages(**{f"{form}messages_key": "turns"}))
    assert "leave one out" in refusal(stages=stages(), warm_start={"path": "b.jsonl"})


def test_notices_are_in_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("trainer: {use_remove_padding: false}\n" + yaml.safe_dump(nested(**with_taskset())))
    config = load_config(file)
    assert config.notices[0] == "trainer.use_remove_padding has no effect here: packs have no padding"
    assert {*config.notices} <= {*warnings_of(config)}


def test_the_table_names_each_key_once_with_its_treatment() -> None:
    keys = [key for key, _ in KEYS]
    assert len(keys) == len(set(keys))
    for _, treatment in KEYS:
        if isinstance(treatment, Moved):
            assert treatment.to
        else:
            assert isinstance(treatment, Noted | Refused) and treatment.reason and not treatment.reason.endswith(".")


def test_keys_below_lists_are_found_entry_by_entry() -> None:
    data = {"a": {"b": [{"c": 1}, {}, {"c": 2}]}}
    assert [(found.shown, found.value()) for found in find(data, "a.b[].c")] == [("a.b[0].c", 1), ("a.b[2].c", 2)]
    assert data == {"a": {"b": [{}, {}, {}]}}


#: A file in which every converter has something to do.
FULL = """
mode: both
model: {model_path: m, enable_thinking: true, tinker: {enable: true, rank: 8}, lora_configs: [{lora_dtype: auto}]}
algorithm:
  algorithm_type: mix
  kl_loss_fn: none
  kl_loss_fn_args: {kl_coef: 0.1}
  kl_penalty_fn: low_var_kl
  advantage_fn: grpo_verl
  advantage_fn_args: {epsilon: 0.1, std_threshold: 0.1, std_cal_level: group, lambda_coef: 0.5}
  policy_loss_fn_args: {mu: 0.2, clip_range: 0.2, train_batch_size_expert: 4, loss_agg_mode: token-mean}
  sample_strategy_args: {expert_data_ratio: 0.2}
  optimizer: {lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.1, warmup_style: cosine}
buffer:
  train_batch_size: 32
  explorer_input:
    default_workflow_type: math_ruler_workflow
    taskset:
      path: a.jsonl
      reward_fn_type: math_dapo_reward
      reward_fn_args: {enable_overlong_penalty: true, max_response_length: 9, cache_length: 3}
      workflow_args: {with_think: true}
      repeat_times: 2
      format: {prompt_key: q}
      task_selector: {selector_type: difficulty_based, feature_keys: [a, b], kwargs: {target_reward: 0.5, m: 1}}
    eval_tasksets: [{path: b.jsonl, repeat_times: 2, reward_fn_type: math_reward, judge_args: {a: 1}}]
  trainer_input:
    auxiliary_buffers: {sft: {path: c.jsonl, format: {prompt_key: q}}}
    experience_buffer: {replay_buffer: {priority_fn: decay_limit_randomization}}
data_processor: {experience_pipeline: {operators: [{name: pass_rate_calculator}]}}
explorer:
  eval_interval: 4
  rollout_model: {engine_num: 2}
  auxiliary_models: [{model_path: j, api_key: EMPTY}]
trainer: {total_steps: 50, grad_clip: 1.0, save_interval: 0}
synchronizer: {sync_method: online, sync_style: explorer_driven, sync_interval: 2}
"""
STAGE = """
stage_name: warm
mode: train
algorithm: {algorithm_type: sft, optimizer: {lr: 0.1, lr_warmup_steps_ratio: 0.1, warmup_style: linear}}
buffer:
  total_epochs: 2
  train_batch_size: 8
  trainer_input: {experience_buffer: {path: a.jsonl, format: {prompt_type: messages, messages_key: messages}}}
trainer: {total_steps: 20}
"""
WRONG: list[Any] = [None, True, 0, -3, 0.5, float("nan"), "", "text", [], [1], ["a", "b"], [{}], {}, {"a": 1}, {1: [2]}]


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of a file."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for key, value in list(entries) for found in [(node, key), *places(value)]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mix", "grpo", "gkd", "dpo", None])
def test_values_of_a_wrong_type_are_left_to_the_validation(name: str | None) -> None:
    file = yaml.safe_load(FULL)
    file["algorithm"]["algorithm_type"] = name
    if name != "mix":  # no other algorithm reads further buffers
        del file["buffer"]["trainer_input"]["auxiliary_buffers"]
    if name == "dpo":
        file["stages"] = [yaml.safe_load(STAGE), {"mode": "both", "algorithm": {"algorithm_type": "grpo"}}]
    refused, accepted = 0, 0
    for container, key in places(file):
        kept = container[key]
        for value in WRONG:
            container[key] = value
            try:
                data, _ = convert(file, "file.yaml")
                list(write_defaults(data, staged=True))
                build_config(data)
                accepted += 1
            except UserError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{key}: {value!r}") from error
        container[key] = kept
    assert refused + accepted == len(WRONG) * len(places(file))
    # The rest of the file is valid, so each value reaches the validation.
    assert refused > 800 and accepted > (400 if name else 0)
