"""Presets name things that exist, overrides take effect, and names that do not exist get an answer."""

import subprocess
import sys
from typing import Any

import pytest

from rft_platform.algorithms.advantages.registry import ADVANTAGES
from rft_platform.algorithms.aggregation import MODES
from rft_platform.algorithms.losses.registry import LOSSES, bind
from rft_platform.algorithms.presets import PRESETS, Preset, choose, preset
from rft_platform.algorithms.token_advantages.registry import TOKEN_ADVANTAGES, check_token_advantage
from rft_platform.common.errors import UserError

#: algorithm_type: loss, advantage, token advantage, aggregation, reference, smallest group
TABLE = {
    "grpo": ("ppo", "grpo", None, "token-mean", "if_beta", 2),
    "multi_step_grpo": ("ppo", "step_wise_grpo", None, "token-mean", "if_beta", 2),
    "ppo": ("ppo", None, "gae", "token-mean", "if_beta", 1),
    "dr_grpo": ("ppo", "grpo", None, "seq-mean-token-sum-norm", "if_beta", 2),
    "dapo": ("ppo", "grpo", None, "token-mean", "if_beta", 2),
    "gspo": ("gspo", "grpo", None, "seq-mean-token-mean", "if_beta", 2),
    "gmpo": ("gmpo", "grpo", None, "seq-mean-token-mean", "if_beta", 2),
    "clip_cov": ("clip_cov", "grpo", None, "token-mean", "if_beta", 2),
    "kl_cov": ("kl_cov", "grpo", None, "token-mean", "if_beta", 2),
    "clip_b": ("clip_b", "grpo", None, "token-mean", "if_beta", 2),
    "clip_v": ("clip_v", "grpo", None, "token-mean", "if_beta", 2),
    "cispo": ("cispo", "grpo", None, "token-mean", "if_beta", 2),
    "sapo": ("sapo", "grpo", None, "token-mean", "if_beta", 2),
    "topr": ("topr", "grpo", None, "token-mean", "if_beta", 2),
    "opmd": ("opmd", "opmd", None, "token-mean", "if_beta", 1),
    "asymre": ("rec", "asymre", None, "token-mean", "if_beta", 2),
    "rec": ("rec", "grpo", None, "token-mean", "if_beta", 2),
    "sppo": ("sppo", "opmd", None, "token-mean", "if_beta", 1),
    "rloo": ("ppo", "rloo", None, "token-mean", "if_beta", 2),
    "remax": ("ppo", "remax", None, "token-mean", "if_beta", 2),
    "reinforce++": ("ppo", None, "reinforce_plus_plus", "token-mean", "if_beta", 1),
    "reinforce++_baseline": ("ppo", None, "reinforce_plus_plus", "token-mean", "if_beta", 2),
    "gigpo": ("ppo", "gigpo", None, "token-mean", "if_beta", 2),
    "dpo": ("dpo", None, None, "seq-mean-token-sum", "always", 1),
    "ipo": ("ipo", None, None, "seq-mean-token-sum", "always", 1),
    "hinge": ("hinge", None, None, "seq-mean-token-sum", "always", 1),
    "kto": ("kto", None, None, "seq-mean-token-sum", "always", 1),
    "simpo": ("simpo", None, None, "seq-mean-token-sum", "never", 1),
    "orpo": ("orpo", None, None, "seq-mean-token-sum", "never", 1),
    "sft": ("sft", None, None, "token-mean", "never", 1),
    "rft": ("sft", None, None, "token-mean", "never", 1),
    "on_policy_distill": ("ppo", None, "on_policy_distill", "token-mean", "never", 1),
    "gkd": ("gkd", None, None, "token-mean", "never", 1),
    "mix": ("mix", "grpo", None, "token-mean", "never", 2),
}


def test_the_table_of_presets() -> None:
    def row(found: Preset) -> tuple[Any, ...]:
        return (
            found.policy_loss, found.advantage, found.token_advantage, found.loss_agg_mode, found.reference,
            found.min_group,
        )  # fmt: skip

    assert {name: row(found) for name, found in PRESETS.items()} == TABLE


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_together(name: str) -> None:
    found = preset(name)
    loss = bind(found.policy_loss, dict(found.policy_loss_args))
    assert choose(name) == found  # its names and options exist, and bring what it says
    if found.token_advantage is not None:
        made = check_token_advantage(found.token_advantage, found.token_advantage_args)
        assert (made.critic, made.teacher) == (found.critic, found.teacher)
    assert loss.policy_gradient == (found.advantage is not None or found.token_advantage is not None)
    assert loss.reference == (found.reference == "always")
    assert loss.teacher <= found.teacher
    assert found.loss_agg_mode in (loss.loss_agg_modes or MODES)
    assert found.repeat_times >= found.min_group


def test_every_loss_and_advantage_has_a_preset_or_is_an_option() -> None:
    assert set(LOSSES.names()) - {p.policy_loss for p in PRESETS.values()} == {"reinforce"}
    assert set(ADVANTAGES.names()) == {p.advantage for p in PRESETS.values()} - {None}
    assert set(TOKEN_ADVANTAGES.names()) == {p.token_advantage for p in PRESETS.values()} - {None}


def test_the_special_settings_of_presets() -> None:
    assert preset("ppo").policy_loss_args == {"clip_low": 0.2, "clip_high": 0.2}
    assert preset("dr_grpo").advantage_args == {"normalize_std": False}
    assert preset("rec").advantage_args == {"normalize_std": False}
    assert preset("asymre").policy_loss_args == {"clip_mode": "none"}
    assert (preset("dapo").drop_zero_variance, preset("dapo").overlong_penalty) == (True, 1.0)
    assert preset("rft").reward_threshold == 1.0
    assert preset("reinforce++_baseline").token_advantage_args == {"baseline": True}
    assert [name for name, p in PRESETS.items() if p.critic] == ["ppo"]
    assert [name for name, p in PRESETS.items() if p.correction == "decoupled"] == ["gspo"]
    assert {name for name, p in PRESETS.items() if p.teacher} == {"gkd", "on_policy_distill"}
    assert [name for name, p in PRESETS.items() if p.experts] == ["mix"]
    assert {p.repeat_times for p in PRESETS.values() if p.min_group == 2} == {8}


def test_grpo_with_the_step_wise_advantage_is_multi_step_grpo() -> None:
    assert choose("grpo", advantage="step_wise_grpo") == preset("multi_step_grpo")


def test_another_advantage_changes_critic_teacher_and_group_size() -> None:
    with_critic = choose("grpo", advantage="gae", advantage_args={"lam": 0.9})
    assert (with_critic.advantage, with_critic.token_advantage) == (None, "gae")
    assert with_critic.critic and with_critic.min_group == 1
    assert with_critic.token_advantage_args == {"lam": 0.9}
    without = choose("ppo", advantage="rloo")
    assert (without.advantage, without.token_advantage, without.critic) == ("rloo", None, False)
    assert (without.min_group, without.repeat_times) == (2, 8)
    taught = choose("grpo", advantage="on_policy_distill")
    assert taught.teacher and not taught.needs_reward
    rewarded = choose("on_policy_distill", advantage="grpo")
    assert not rewarded.teacher and rewarded.needs_reward
    assert choose("reinforce++", advantage_args={"baseline": True}).min_group == 2


def test_a_loss_has_the_correction_of_its_preset_unless_one_is_set() -> None:
    assert choose("grpo", policy_loss="gspo").correction == "decoupled"
    assert (
        choose("gspo", policy_loss="ppo").correction == choose("gspo", policy_loss="reinforce").correction == "bypass"
    )
    assert choose("gspo", correction="bypass").correction == "bypass"
    assert choose("grpo", correction="decoupled").correction == "decoupled"


def test_a_loss_of_pairs_has_the_reference_of_its_preset() -> None:
    assert choose("simpo", policy_loss="ipo").reference == "always"
    assert choose("dpo", policy_loss="orpo").reference == "never"
    assert choose("grpo", policy_loss="dpo").reference == "if_beta"  # it is refused: grpo has no pairs


def test_arguments_belong_to_the_function_in_force() -> None:
    assert choose("dr_grpo", advantage_args={"eps": 0.1}).advantage_args == {"normalize_std": False, "eps": 0.1}
    assert choose("dr_grpo", advantage="rloo").advantage_args == {}
    assert choose("ppo", policy_loss="cispo").policy_loss_args == {}
    assert choose("ppo", policy_loss_args={"clip_high": 0.3}).policy_loss_args == {"clip_low": 0.2, "clip_high": 0.3}
    assert choose("grpo", loss_agg_mode="seq-mean-token-sum").loss_agg_mode == "seq-mean-token-sum"


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("gprpo", {}, "did you mean 'grpo'"),
        ("grpo", {"advantage": "gea"}, "unknown advantage function 'gea': did you mean 'gae'"),
        ("grpo", {"advantage_args": {"normalise_std": False}}, "did you mean 'normalize_std'"),
        ("gigpo", {"advantage_args": {"env_state_hash": []}}, "unknown argument"),
        ("ppo", {"advantage_args": {"lambda": 1.0}}, "'lambda'"),
        ("grpo", {"advantage_args": {"eps": "small"}}, "argument 'eps' .* is 'small': input should be a valid number"),
        ("grpo", {"advantage_args": {"normalize_std": 1}}, "'normalize_std' .* is 1: input should be a valid boolean"),
        ("opmd", {"advantage_args": {"baseline": "median"}}, "input should be 'mean' or 'logavgexp'"),
        ("sft", {"advantage_args": {"eps": 1.0}}, "uses no advantage"),
        ("dpo", {"advantage": "grpo"}, "trains on preferences"),
        ("grpo", {"loss_agg_mode": "token_mean"}, "did you mean 'token-mean'"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused(name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        choose(name, **changes)


@pytest.mark.slow
def test_presets_and_advantages_load_without_torch() -> None:
    code = (
        "import sys; from rft_platform.algorithms.presets import choose; choose('grpo'); choose('ppo'); "
        "import rft_platform.rounds.setup.algorithm, rft_platform.judging.execution.judge_rollouts; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"
