"""Named algorithms: which loss, which advantage, what else they need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from rft_platform.algorithms.registry import unknown_name
from rft_platform.errors import UserError


@dataclass(frozen=True, slots=True)
class Preset:
    """What an ``algorithm_type`` stands for; single keys of the configuration override it."""

    policy_loss: str
    advantage: str | None  # made of rewards when a round is judged; None: the rows need no reward
    trains_on: Literal["rollouts", "demonstrations", "preferences"] = "rollouts"
    policy_loss_args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    token_advantage: str | None = None  # made by the trainer, where values, teacher or reference are known
    token_advantage_args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    advantage_args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    loss_agg_mode: str = "token-mean"
    reference: Literal["never", "if_beta", "always"] = "never"  # when a reference model is loaded
    critic: bool = False
    teacher: bool = False
    experts: bool = False  # demonstrations are mixed in among the rollouts
    min_group: int = 1  # smallest number of runs a task
    repeat_times: int = 1  # runs a task when the configuration gives no number


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": Preset("ppo", "grpo", reference="if_beta", min_group=2, repeat_times=8),
        "multi_step_grpo": Preset("ppo", "step_wise_grpo", reference="if_beta", min_group=2, repeat_times=8),
        "sft": Preset("sft", None, trains_on="demonstrations"),
    }
)

PLANNED = frozenset(
    {"ppo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "topr", "opmd", "rloo", "reinforce++", "gigpo"}
    | {"dpo", "rft", "on_policy_distill", "gkd", "mix"}
)
"""Algorithms of the field that are not built here yet; naming one gets an answer of its own."""


def preset(algorithm_type: str) -> Preset:
    """The preset called ``algorithm_type``; UserError when there is none (yet)."""
    if algorithm_type in PRESETS:
        return PRESETS[algorithm_type]
    if algorithm_type in PLANNED:
        raise UserError(f"algorithm_type {algorithm_type!r} is not built yet: use one of {', '.join(sorted(PRESETS))}")
    raise UserError(unknown_name("algorithm_type", algorithm_type, PRESETS))


def check_group_size(algorithm_type: str, repeat_times: int) -> None:
    """UserError when a group algorithm is given fewer runs a task than it can compare."""
    least = preset(algorithm_type).min_group
    if repeat_times < least:
        raise UserError(
            f"algorithm_type {algorithm_type!r} compares the runs of one task, but repeat_times is {repeat_times}: "
            f"every advantage would be 0. Set repeat_times to {least} or more (8 is usual)"
        )
