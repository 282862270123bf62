"""Combine a preset with the functions that the configuration sets instead, and with the requirements of those."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rft_platform.algorithms.advantages.registry import ADVANTAGES, check_advantage
from rft_platform.algorithms.aggregation import check_mode
from rft_platform.algorithms.presets import Preset, preset
from rft_platform.algorithms.registry import unknown_name
from rft_platform.algorithms.token_advantages.registry import TOKEN_ADVANTAGES, check_token_advantage
from rft_platform.errors import UserError


def choose(
    algorithm_type: str,
    *,
    advantage: str | None = None,
    advantage_args: Mapping[str, Any] | None = None,
    policy_loss: str | None = None,
    policy_loss_args: Mapping[str, Any] | None = None,
    loss_agg_mode: str | None = None,
) -> Preset:
    """Return the preset ``algorithm_type`` with some parts replaced; None keeps the preset's part.

    ``advantage`` names an advantage from rewards or a token advantage of the trainer; group size, critic and teacher
    follow from it. Arguments go to the function in use; the preset's arguments apply only to the preset's own function.
    Raises UserError for an unknown name, and for an option that the advantage does not have.
    """
    base = preset(algorithm_type)
    loss = policy_loss or base.policy_loss
    kept = base.policy_loss_args if loss == base.policy_loss else {}
    chosen = replace(
        base,
        policy_loss=loss,
        policy_loss_args={**kept, **(policy_loss_args or {})},
        loss_agg_mode=check_mode(loss_agg_mode or base.loss_agg_mode),
    )
    return _with_advantage(chosen, algorithm_type, advantage, advantage_args or {})


def _with_advantage(chosen: Preset, algorithm_type: str, advantage: str | None, args: Mapping[str, Any]) -> Preset:
    name = advantage or chosen.advantage or chosen.token_advantage
    if name is None:
        if args:
            raise UserError(
                f"algorithm.advantage_fn_args {sorted(args)}: {algorithm_type} has no advantage to give it to"
            )
        return chosen
    if chosen.trains_on != "rollouts":
        raise UserError(f"algorithm.advantage_fn {name!r}: {algorithm_type} trains on {chosen.trains_on}, without one")
    own = name in (chosen.advantage, chosen.token_advantage)
    if name in ADVANTAGES.names():
        options = {**(chosen.advantage_args if own else {}), **args}
        entry = check_advantage(name, options)
        return _with(
            chosen, own, advantage=name, advantage_args=options, token_advantage=None, token_advantage_args={},
            critic=False, min_group=entry.min_group,
        )  # fmt: skip
    if name not in TOKEN_ADVANTAGES.names():
        raise UserError(unknown_name("advantage function", name, [*ADVANTAGES.names(), *TOKEN_ADVANTAGES.names()]))
    options = {**(chosen.token_advantage_args if own else {}), **args}
    made = check_token_advantage(name, options)
    return _with(
        chosen, own, advantage=None, advantage_args={}, token_advantage=name, token_advantage_args=options,
        critic=made.critic, teacher=made.teacher, needs_reward=made.rewards,
        min_group=2 if options.get("baseline") else 1,
    )  # fmt: skip


def _with(chosen: Preset, own: bool, **changes: Any) -> Preset:
    """Apply ``changes``. A foreign advantage also brings its own needs: rewards, and several runs to compare."""
    if not own:
        changes = {"needs_reward": True, "teacher": chosen.policy_loss == "gkd", **changes}
        changes["repeat_times"] = max(chosen.repeat_times, 8 if changes["min_group"] > 1 else 1)
    return replace(chosen, **changes)
