"""Keys of the critic: what they come to, and where they are refused."""

from collections.abc import Callable
from typing import Any

import pytest

from rft_platform.algorithms.presets import PRESETS
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.algorithm import Critic
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.config.training_specs import optimizer_spec
from rft_platform.training.models.optimizer import learning_rate
from tests.support.builders import problems

MakeConfig = Callable[..., RftConfig]


def test_ppo_has_a_critic_with_settings_of_its_own(make_config: MakeConfig) -> None:
    config = make_config(algorithm__algorithm_type="ppo", algorithm__critic={"lr": 3e-5, "warmup_steps": 2})
    assert problems(config) == []
    assert config.algorithm.critic == Critic(lr=3e-5, warmup_steps=2, value_clip=0.2)
    spec = resolve(config).spec
    assert spec.critic is not None and spec.token_advantage == "gae"


def test_the_rate_of_the_policy_is_scheduled_after_the_warm_up_of_the_critic(make_config: MakeConfig) -> None:
    keys = {"algorithm__algorithm_type": "ppo", "algorithm__critic": {"warmup_steps": 4}}
    optimizer = {"lr": 1e-3, "lr_warmup_steps": 4, "lr_scheduler_type": "linear"}
    run = resolve(make_config(**keys, algorithm__optimizer=optimizer))
    spec = optimizer_spec(run.config.algorithm.optimizer, 16, run.critic_only_steps)
    assert [learning_rate(spec, step) for step in (4, 7, 8, 12)] == pytest.approx([2.5e-4, 1e-3, 1e-3, 5e-4])
    assert learning_rate(spec, 16) == 0
    (line,) = problems(make_config(**keys, algorithm__optimizer=optimizer | {"total_steps": 8}))
    assert "lr_warmup_steps 4 (after the 4 steps of algorithm.critic.warmup_steps) does not end before" in line
    assert problems(make_config(**keys, algorithm__optimizer=optimizer | {"total_steps": 9})) == []


def test_gae_adds_its_critic_to_another_preset(make_config: MakeConfig) -> None:
    config = make_config(algorithm__advantage_fn="gae", algorithm__advantage_fn_args={"lam": 0.95, "whiten": False})
    spec = resolve(config).spec
    assert spec.critic is not None and spec.token_advantage_args == {"lam": 0.95, "whiten": False}
    assert PRESETS["grpo"].critic is False


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"algorithm__critic": {"lr": 3e-5}}, "algorithm.critic: grpo has no critic"),
        ({"algorithm__critic": {"lr": Critic().lr}}, "algorithm.critic: grpo has no critic"),
        ({"model__critic_model_path": "owner/model"}, "model.critic_model_path: grpo has no critic"),
        ({"algorithm__critic": {"lr_scheduler_type": "linear"}, "algorithm__algorithm_type": "ppo",
          "buffer__total_steps": None}, "algorithm.critic.lr_scheduler_type linear needs the end of the run"),
        ({"algorithm__algorithm_type": "on_policy_distill", "algorithm__teacher_model_path": "owner/model",
          "algorithm__kl_penalty_fn_args": {"kl_coef": 0.1}}, "on_policy_distill uses no reward"),
        ({"algorithm__critic": {"lr_warmup_steps": 99, "total_steps": 50}, "algorithm__algorithm_type": "ppo"},
         "algorithm.critic.lr_warmup_steps 99 does not end before algorithm.critic.total_steps 50"),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_is_refused(make_config: MakeConfig, settings: dict[str, Any], expected: str) -> None:
    found = problems(make_config(**settings))
    assert len(found) == 1
    assert expected in found[0]
