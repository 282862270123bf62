"""From section ``algorithm`` of the configuration to judge and trainer: every key arrives or is refused."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rft_platform.algorithms.aggregation import MODES
from rft_platform.algorithms.common.registry import REGISTRIES
from rft_platform.algorithms.presets import PRESETS
from rft_platform.algorithms.spec import AlgorithmSpec, CriticSpec, KlPenaltySpec
from rft_platform.common.errors import UserError
from rft_platform.config.checks.algorithm import loss_problems
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.findings import refuse
from rft_platform.config.load import build_config, dump_config, load_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.rounds.setup.algorithm import check_operators, pipeline_of
from tests.support.findings import warnings_of

Configure = Callable[..., RftConfig]
EXPERTS = {"experts": {"path": "demonstrations.jsonl"}}


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """A valid configuration with these keys in section ``algorithm`` and ``model``."""
    model, data = tmp_path / "model", tmp_path / "train.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    data.write_text('{"question": "1+1", "answer": "2"}\n')

    def make(
        algorithm_type: str = "grpo",
        *,
        model_keys: dict[str, Any] | None = None,
        data: list[dict[str, Any]] | None = None,
        **keys: Any,
    ) -> RftConfig:
        return build_config(
            {
                "model": {"model_path": str(model), **(model_keys or {})},
                "algorithm": {"algorithm_type": algorithm_type, **keys},
                "data_processor": {"experience_pipeline": {"operators": data or []}},
                "buffer": {"batch_size": 4, "total_steps": 3, "explorer_input": {"taskset": {"path": str(data)}}},
            }
        )

    return make


def operators(config: RftConfig) -> list[tuple[str, dict[str, Any]]]:
    return [(entry.name, dict(entry.args)) for entry in pipeline_of(resolve(config)).operators]


def problems(config: RftConfig) -> str:
    """What is wrong with a configuration, all checks together."""
    try:
        refuse(settings_findings(resolve(config), Machine(2, 0)))
        check_operators(resolve(config))
    except UserError as error:
        return str(error)
    return ""


def problems_of_parts(config: RftConfig) -> str:
    """What is wrong with how the parts of the algorithm fit together."""
    try:
        refuse(loss_problems(resolve(config)))
    except UserError as error:
        return str(error)
    return ""


def test_every_exploring_preset_is_valid_and_reaches_the_trainer(configure: Configure, tmp_path: Path) -> None:
    teacher = {"teacher_model_path": str(tmp_path / "model")}
    experts = {"experts": {"path": str(tmp_path / "train.jsonl")}}
    for name, preset in PRESETS.items():
        if preset.trains_on != "rollouts":
            assert "mode: train" in problems(configure(name))
            continue
        config = configure(name, **(teacher if preset.teacher else {}), **(experts if preset.experts else {}))
        assert problems(config) == "", name
        spec = resolve(config).spec
        assert (spec.policy_loss, spec.loss_agg_mode) == (preset.policy_loss, preset.loss_agg_mode)
        assert (spec.token_advantage, spec.correction) == (preset.token_advantage, preset.correction)
        assert (spec.critic == CriticSpec()) == preset.critic
        assert (spec.expert_weight is not None) == preset.experts


def test_every_key_reaches_the_trainer(configure: Configure) -> None:
    config = configure(
        "reinforce++",
        policy_loss_fn="cispo",
        policy_loss_fn_args={"clip_high": 0.5},
        advantage_fn_args={"gamma": 0.9},
        kl_loss_fn="k3",
        kl_loss_fn_args={"kl_coef": 0.05},
        kl_penalty_fn="k2",
        kl_penalty_fn_args={"kl_coef": 0.01, "target": 0.1, "horizon": 500},
        entropy_loss_fn_args={"entropy_coef": 0.002},
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_norm_length=77,
        rollout_correction={
            "mode": "decoupled",
            "weight_cap": 3,
            "weight_level": "sequence",
            "weight_bound": "mask",
            "token_mask": [0.5, 5],
            "sequence_mask": [0.9, 1.1],
            "sequence_mask_ratio": "product",
            "token_veto": 1e-4,
        },
    )
    assert problems(config) == ""
    assert resolve(config).spec == AlgorithmSpec(
        policy_loss="cispo",
        policy_loss_args={"clip_high": 0.5},
        loss_agg_mode="seq-mean-token-sum-norm",
        beta=0.05,
        entropy_coef=0.002,
        kl_loss="k3",
        loss_norm_length=77,
        token_mask=(0.5, 5.0),
        row_mask=(0.9, 1.1),
        row_mask_ratio="product",
        token_veto=1e-4,
        correction="decoupled",
        weight_cap=3.0,
        weight_level="sequence",
        weight_bound="mask",
        token_advantage="reinforce_plus_plus",
        token_advantage_args={"gamma": 0.9},
        kl_penalty=KlPenaltySpec("k2", 0.01, 0.1, 500.0),
    )


def test_a_written_out_configuration_means_the_same(configure: Configure, tmp_path: Path) -> None:
    for name in ("grpo", "dapo", "rft", "gspo"):
        config = configure(name)
        file = tmp_path / f"{name}.yaml"
        file.write_text(dump_config(config))
        again = load_config(file)
        assert (again, problems(again), resolve(again).spec) == (config, "", resolve(config).spec)


def test_the_constant_length_is_that_of_the_longest_response(configure: Configure) -> None:
    assert resolve(configure("dr_grpo", model_keys={"max_response_tokens": 96})).spec.loss_norm_length == 96
    assert resolve(configure("dr_grpo", model_keys={"max_model_len": 300})).spec.loss_norm_length == 150
    assert resolve(configure("grpo", model_keys={"max_response_tokens": 96})).spec.loss_norm_length is None


def test_filters_come_from_preset_and_keys(configure: Configure) -> None:
    limit = {"max_response_tokens": 100}
    sampling = ("dynamic_sampling", {"max_batches": 3})
    assert operators(configure("grpo", model_keys=limit)) == []
    lengths = {"max_length": 100, "cache_length": 20, "weight": 1.0}
    dapo = configure("dapo", model_keys=limit)
    assert operators(dapo) == [sampling, ("overlong_penalty", lengths), ("surplus_groups", {})]
    assert operators(configure("rft")) == [("reward_filter", {"threshold": 1.0})]
    changed = configure(
        "dapo",
        filters={
            "zero_variance": False,
            "reward_threshold": -0.5,
            "overlong": {"weight": 0.5, "max_length": 60, "cache_length": 7},
        },
    )
    lengths = {"max_length": 60, "cache_length": 7, "weight": 0.5}
    assert operators(changed) == [("overlong_penalty", lengths), ("reward_filter", {"threshold": -0.5})]
    without = configure("dapo", filters={"overlong": {"weight": 0}, "max_batches": 1})
    assert operators(without) == [("dynamic_sampling", {"max_batches": 1})]
    with_grpo = configure("grpo", filters={"zero_variance": True, "reward_threshold": 0.25})
    assert operators(with_grpo) == [("dynamic_sampling", {"max_batches": 1}), ("reward_filter", {"threshold": 0.25})]


def test_the_threshold_of_an_advantage_is_a_filter_too(configure: Configure) -> None:
    config = configure("multi_step_grpo", advantage_fn_args={"std_threshold": 0.1})
    assert problems(config) == ""
    assert operators(config) == [("std_filter", {"threshold": 0.1})]
    assert operators(configure("multi_step_grpo")) == []


def test_operators_of_the_configuration_follow_and_replace_those_of_the_algorithm(configure: Configure) -> None:
    given = [
        {"name": "truncated_mask", "args": {"mode": "drop"}},
        {"name": "dynamic_sampling", "args": {"max_batches": 2, "of": "reward"}},
    ]
    config = configure("dapo", data=given)
    assert problems(config) == ""
    names = ["overlong_penalty", "truncated_mask", "dynamic_sampling", "surplus_groups"]
    assert [name for name, _ in operators(config)] == names
    assert pipeline_of(resolve(config)).version == pipeline_of(resolve(config)).version
    assert pipeline_of(resolve(config)).version != pipeline_of(resolve(configure("dapo"))).version
    assert pipeline_of(resolve(configure("grpo"))).version is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"data": [{"name": "reward_filterr"}]}, "did you mean 'reward_filter'?"),
        ({"data": [{"name": "std_filter", "args": {"treshold": 1}}]}, "did you mean 'threshold'?"),
        ({"data": [{"name": "std_filter", "args": {"threshold": -1}}]}, "greater than or equal to 0"),
        ({"data": [{"name": "reward_filter"}]}, "give threshold, max_reward or both"),
        ({"data": [{"name": "no.module:here"}]}, "cannot import no.module"),
        ({"data": [{"name": "overlong_penalty", "args": {"max_length": 5, "cache_length": 6}}]}, "0 < cache_length"),
        (
            {"data": [{"name": "dynamic_sampling"}], "repeat_times": 1},
            "compares the runs of a task, and a task has only 1 run",
        ),
        (
            {"data": [{"name": "reward_filter"}], "filters": {"reward_threshold": 1}},
            "does the same; keep one of the two",
        ),
        ({"filters": {"max_batches": 2}}, "no filter drops groups without a learning signal"),
        ({"data": [{"name": "std_filter"}], "algorithm_type": "sft"}, "has no rewards to process"),
    ],
)
def test_operators_that_do_not_fit_are_refused(configure: Configure, keys: dict[str, Any], said: str) -> None:
    assert said in problems(configure(**keys))


def test_valid_combinations_are_accepted(configure: Configure) -> None:
    for name, keys in (
        ("rft", {"filters": {"zero_variance": True}}),
        (
            "on_policy_distill",
            {"filters": {"zero_variance": True}, "repeat_times": 2, "teacher_model_path": "owner/teacher"},
        ),
        ("ppo", {"kl_penalty_fn_args": {"kl_coef": 0.1, "target": 0.1, "horizon": 5}}),
        ("reinforce++_baseline", {"data": [{"name": "truncated_mask"}]}),
        ("mix", {**EXPERTS, "policy_loss_fn": "mix", "advantage_fn": "rloo"}),
        ("mix", {"experts": {"path": "x.jsonl", "final_weight": 0.01, "decay_steps": 4}}),
        ("grpo", {"advantage_fn_args": {"normalize_std": False, "std_level": "group"}}),
        ("dr_grpo", {"advantage_fn_args": {"normalize_std": True, "std_level": "batch"}}),
        ("ppo", {"advantage_fn_args": {"lam_critic": 1.0, "lam_alpha": 0.05}}),
    ):
        assert problems(configure(name, **keys)) == "", name


def test_the_entropy_bonus_can_be_switched_off(configure: Configure) -> None:
    given = {"entropy_loss_fn_args": {"entropy_coef": 0.1}}
    assert resolve(configure(entropy_loss_fn="default", **given)).spec.entropy_coef == 0.1
    assert resolve(configure(entropy_loss_fn="none", **given)).spec.entropy_coef == 0.0


@pytest.mark.parametrize(
    ("algorithm_type", "keys", "expected"),
    [
        ("mix", {}, "algorithm.experts is not set"),
        ("grpo", {"experts": {"path": "demonstrations.jsonl"}}, "uses no demonstrations"),
        ("gkd", {}, "algorithm.teacher_model_path is not set"),
        ("on_policy_distill", {}, "algorithm.teacher_model_path is not set"),
        ("grpo", {"teacher_model_path": "big"}, "has no teacher"),
        ("grpo", {"kl_penalty_fn_args": {"kl_coef": 0.1}}, "one advantage per row"),
        ("grpo", {"loss_norm_length": 10}, "divides by no constant"),
        ("grpo", {"filters": {"overlong": {"max_length": 10}}}, "its weight is 0"),
        ("dapo", {"filters": {"overlong": {"cache_length": 5000}}}, "cache_length 5000 is more than"),
        ("sft", {"filters": {"reward_threshold": 1.0}}, "has no rewards to filter by"),
        ("grpo", {"policy_loss_fn": "ppoo"}, "did you mean 'ppo'"),
        ("grpo", {"policy_loss_fn_args": {"clip_hi": 0.3}}, "did you mean 'clip_high'"),
        ("grpo", {"policy_loss_fn": "dpo"}, "compares pairs"),
        ("grpo", {"policy_loss_fn": "simpo"}, "compares pairs"),
        ("gspo", {"loss_agg_mode": "token-mean"}, "objective of the loss gspo: set it to seq-mean-token-mean"),
        ("grpo", {"policy_loss_fn": "gspo"}, "algorithm.loss_agg_mode is token-mean, which changes the objective"),
        ("rft", {"policy_loss_fn": "ppo"}, "set algorithm.advantage_fn"),
        ("rft", {"advantage_fn": "grpo"}, "reads no advantage"),
        ("grpo", {"rollout_correction": {"weight_cap": 3}}, "has no effect on the loss ppo in mode bypass"),
        ("grpo", {"rollout_correction": {"weight_level": "sequence"}}, "weight_level has no effect on the loss ppo"),
        ("grpo", {"rollout_correction": {"weight_bound": "mask"}}, "weight_bound has no effect on the loss ppo"),
        ("grpo", {"rollout_correction": {"sequence_mask_ratio": "product"}}, "no effect without sequence_mask"),
        ("rft", {"rollout_correction": {"token_mask": [0.5, 5]}}, "uses no log-probs of the engine"),
        ("grpo", {"rollout_correction": {"token_mask": [1.5, 5]}}, "token_mask [1.5, 5.0] excludes the ratio 1"),
        ("gspo", {"rollout_correction": {"sequence_mask": [0, 0.9]}}, "sequence_mask [0.0, 0.9] excludes the ratio 1"),
        ("grpo", {"rollout_correction": {"token_veto": 2}}, "token_veto 2 excludes almost every row"),
        ("grpo", {"repeat_times": 1}, "one run gives no signal; set it to 8"),
        ("ppo", {"advantage_fn": "rloo", "repeat_times": 1}, "one run gives no signal"),
        ("mix", {**EXPERTS, "policy_loss_fn": "ppo"}, "the loss ppo cannot train on demonstrations"),
        ("mix", {**EXPERTS, "advantage_fn": "reinforce_plus_plus"}, "computed when a round is judged, such as grpo"),
        ("ppo", {"kl_penalty_fn_args": {"target": 0.1}}, "set algorithm.kl_penalty_fn_args.kl_coef"),
        ("ppo", {"kl_penalty_fn_args": {"kl_coef": 0.1, "horizon": 5}}, "set algorithm.kl_penalty_fn_args.target"),
        ("grpo", {"policy_loss_fn": "gkd"}, "grpo has none: set algorithm_type: gkd"),
        (
            "gkd",
            {"policy_loss_fn": "sft", "teacher_model_path": "owner/teacher"},
            "learns nothing from the teacher of gkd",
        ),
        ("ppo", {"filters": {"zero_variance": True}}, "with 1 run per task no group has variance"),
        ("rft", {"filters": {"zero_variance": True}, "repeat_times": 1}, "set algorithm.repeat_times to 2 or more"),
        ("on_policy_distill", {"filters": {"zero_variance": True}}, "with 1 run per task no group has variance"),
        (
            "mix",
            {"experts": {"path": "x.jsonl", "final_weight": 0.01}},
            "without warmup_steps or decay_steps",
        ),
        (
            "grpo",
            {"advantage_fn_args": {"normalize_std": False, "std_level": "batch"}},
            "normalize_std is false",
        ),
        ("dr_grpo", {"advantage_fn_args": {"std_level": "batch"}}, "normalize_std is false"),
        ("ppo", {"advantage_fn_args": {"lam": 0.9, "lam_alpha": 0.05}}, "lam: lam_alpha replaces it"),
    ],
)
def test_a_key_without_effect_is_refused(
    configure: Configure, algorithm_type: str, keys: dict[str, Any], expected: str
) -> None:
    assert expected in problems(configure(algorithm_type, **keys))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"kl_loss_fn": "k4"}, "algorithm.kl_loss_fn: got 'k4'"),
        ({"kl_loss_fn_args": {"kl_coeff": 0.1}}, "did you mean algorithm.kl_loss_fn_args.kl_coef"),
        ({"kl_penalty_fn_args": {"target": -1}}, "algorithm.kl_penalty_fn_args.target"),
        ({"entropy_loss_fn_args": {"coef": 1}}, "unknown key algorithm.entropy_loss_fn_args.coef"),
        ({"rollout_correction": {"mode": "both"}}, "'bypass' or 'decoupled'"),
        ({"rollout_correction": {"token_mask": [5, 0.5]}}, "low < high"),
        ({"filters": {"overlong": {"max_length": 5, "cache_length": 6}}}, "is more than max_length 5"),
        ({"experts": {"path": "x.jsonl", "weight": 1.0}}, "algorithm.experts.weight"),
    ],
)
def test_the_error_names_a_malformed_key(configure: Configure, keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        configure(**keys)
    assert expected in str(error.value)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_preferences_are_averaged_over_pairs_only(configure: Configure, mode: str) -> None:
    said = problems_of_parts(configure("dpo", loss_agg_mode=mode))
    assert said == (
        f"algorithm.loss_agg_mode is {mode}, which changes the objective of the loss dpo: set it to seq-mean-token-sum"
    )
    assert problems_of_parts(configure("dpo", loss_agg_mode="seq-mean-token-sum")) == ""


def test_a_loss_of_pairs_stays_with_pairs(configure: Configure) -> None:
    said = problems_of_parts(configure("orpo", policy_loss_fn="sft"))
    assert said.endswith("trains on pairs: leave it out, or set the algorithm_type of the loss")
    for name in ("dpo", "ipo", "hinge", "simpo", "orpo"):
        assert problems_of_parts(configure("dpo", policy_loss_fn=name)) == ""
        wrong = configure(name, loss_agg_mode="token-mean")
        assert problems_of_parts(wrong).endswith(f"objective of the loss {name}: set it to seq-mean-token-sum")


def test_losses_of_single_tokens_allow_every_aggregation(configure: Configure) -> None:
    for mode in MODES:
        assert problems(configure("grpo", loss_agg_mode=mode)) == ""


def test_weights_are_capped_where_there_are_weights(configure: Configure) -> None:
    cap = {"weight_cap": 3.0}
    for keys in (
        {"rollout_correction": {**cap, "mode": "decoupled"}},
        {"rollout_correction": cap, "policy_loss_fn": "reinforce"},
        {"rollout_correction": cap, "kl_loss_fn_args": {"kl_coef": 0.1}},
    ):
        assert problems(configure(**keys)) == ""


def test_gspo_compares_with_the_trainers_policy_unless_the_sampler_is_set(configure: Configure) -> None:
    assert resolve(configure("gspo")).spec.correction == "decoupled"
    cap = configure("gspo", rollout_correction={"weight_cap": 3})
    assert (problems(cap), resolve(cap).spec.correction) == ("", "decoupled"), "there is a weight to cap"
    bypass = configure("gspo", rollout_correction={"mode": "bypass"})
    assert (problems(bypass), resolve(bypass).spec.correction) == ("", "bypass")
    capped = configure("gspo", rollout_correction={"mode": "bypass", "weight_cap": 3})
    assert "has no effect on the loss gspo in mode bypass" in problems(capped)


def test_a_stored_default_correction_of_a_loss_without_a_ratio_is_accepted(configure: Configure) -> None:
    stored = {"mode": "bypass", "weight_cap": 2.0, "token_mask": None, "sequence_mask": None}
    for keys in ({}, {"policy_loss_fn": "sft"}):
        assert problems(configure("rft", rollout_correction=stored, **keys)) == ""
    assert "uses no log-probs of the engine" in problems(configure("rft", rollout_correction={"mode": "decoupled"}))


def test_parts_without_effect_are_reported(configure: Configure) -> None:
    said = warnings_of(configure(kl_loss_fn="k1", kl_loss_fn_args={"kl_coef": 0.1}))
    assert any("k1 has no gradient" in line for line in said)
    said = warnings_of(configure("ppo", kl_penalty_fn="k1"))
    assert any("kl_penalty_fn has no effect" in line for line in said)


def test_sampling_of_algorithms_with_token_advantages_is_checked_too(configure: Configure) -> None:
    assert "model.top_p is 0.9" in problems(configure("ppo", model_keys={"top_p": 0.9}))
    assert problems(configure("rft", model_keys={"top_p": 0.9})) == ""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that registers the loss ``my_loss``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_rft_losses.py").write_text(
        "from rft_platform.algorithms.losses.registry import TokenLoss, loss\n"
        "@loss('my_loss')\n"
        "def my_loss(tokens, *, power: float = 2.0):\n"
        "    return TokenLoss(-tokens.advantage * tokens.logp * power)\n"
    )
    yield "my_rft_losses"
    sys.modules.pop("my_rft_losses", None)
    for registry in REGISTRIES:
        registry.forget("my_rft_losses")


def test_a_plugins_loss_can_be_configured(configure: Configure, plugin: str) -> None:
    keys = {"policy_loss_fn": "my_loss", "policy_loss_fn_args": {"power": 3.0}}
    assert "unknown policy_loss_fn 'my_loss'" in problems(configure(**keys))
    config = configure(**keys, plugins=[plugin])
    assert problems(config) == ""
    assert resolve(config).spec.plugins == (plugin,)
    with pytest.raises(UserError, match="cannot be imported"):
        resolve(configure(plugins=["no_such_plugin"]))
