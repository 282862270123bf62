"""Named algorithms (``algorithm_type``): their loss, their advantage, and what else they need.

``choose`` replaces functions of a preset by those that the configuration sets, and adds what these functions need.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from rft_platform.algorithms.advantages.registry import ADVANTAGES, check_advantage
from rft_platform.algorithms.aggregation import check_mode
from rft_platform.algorithms.common.registry import unknown_name
from rft_platform.algorithms.token_advantages.registry import TOKEN_ADVANTAGES, check_token_advantage
from rft_platform.common.errors import UserError


def _frozen(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType(values)


@dataclass(frozen=True, slots=True)
class Preset:
    """The meaning of an ``algorithm_type``; single keys of the configuration override it."""

    policy_loss: str
    advantage: str | None  # computed from rewards when a round is judged; None: no such advantage
    trains_on: Literal["rollouts", "demonstrations", "preferences"] = "rollouts"
    policy_loss_args: Mapping[str, Any] = field(default_factory=_frozen)
    token_advantage: str | None = None  # computed by the trainer from values, teacher or reference
    token_advantage_args: Mapping[str, Any] = field(default_factory=_frozen)
    advantage_args: Mapping[str, Any] = field(default_factory=_frozen)
    loss_agg_mode: str = "token-mean"
    correction: Literal["bypass", "decoupled"] = "bypass"  # denominator of the ratio: see ``objective``
    reference: Literal["never", "if_beta", "always"] = "never"  # when a reference model is loaded
    critic: bool = False
    teacher: bool = False
    experts: bool = False  # demonstrations are mixed into the rollouts
    min_group: int = 1  # minimum number of runs per task
    repeat_times: int = 1  # default number of runs per task
    needs_reward: bool = True  # False: the algorithm learns from a teacher or an expert instead
    drop_zero_variance: bool = False  # drop groups whose runs all have the same reward
    max_batches: int = 1  # most batches of tasks sampled to replace dropped groups, including the first batch
    reward_threshold: float | None = None  # drop rows of runs with a lower reward
    overlong_penalty: float = 0.0  # weight of the soft over-long penalty in the reward

    @property
    def greedy_run(self) -> bool:
        """Whether the first run of each task is decoded greedily, as a baseline that is not trained on."""
        return self.advantage is not None and ADVANTAGES.get(self.advantage).greedy_run


def _group(policy_loss: str, advantage: str, **others: Any) -> Preset:
    """Preset of an algorithm that compares the runs of a task."""
    usual: dict[str, Any] = {"reference": "if_beta", "min_group": 2, "repeat_times": 8}
    return Preset(policy_loss, advantage, **(usual | others))


def _preferences(policy_loss: str, reference: Literal["never", "always"] = "never") -> Preset:
    """Preset of an algorithm that learns from preference pairs: the mean over pairs of a loss of each pair."""
    return Preset(
        policy_loss,
        None,
        trains_on="preferences",
        loss_agg_mode="seq-mean-token-sum",
        reference=reference,
        needs_reward=False,
    )


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": _group("ppo", "grpo"),
        "multi_step_grpo": _group("ppo", "step_wise_grpo"),
        "ppo": Preset(
            "ppo",
            None,
            policy_loss_args=_frozen(clip_low=0.2, clip_high=0.2),
            token_advantage="gae",
            reference="if_beta",
            critic=True,
        ),
        "dr_grpo": _group(
            "ppo", "grpo", advantage_args=_frozen(normalize_std=False), loss_agg_mode="seq-mean-token-sum-norm"
        ),
        "dapo": _group("ppo", "grpo", drop_zero_variance=True, max_batches=3, overlong_penalty=1.0),
        # The clip range of gspo is below the difference of bfloat16 log-probs between engine and trainer.
        "gspo": _group("gspo", "grpo", loss_agg_mode="seq-mean-token-mean", correction="decoupled"),
        "gmpo": _group("gmpo", "grpo", loss_agg_mode="seq-mean-token-mean"),
        "clip_cov": _group("clip_cov", "grpo"),
        "kl_cov": _group("kl_cov", "grpo"),
        "clip_b": _group("clip_b", "grpo"),
        "clip_v": _group("clip_v", "grpo"),
        "cispo": _group("cispo", "grpo"),
        "sapo": _group("sapo", "grpo"),
        "topr": _group("topr", "grpo"),
        "opmd": _group("opmd", "opmd", min_group=1),
        "asymre": _group("rec", "asymre", policy_loss_args=_frozen(clip_mode="none")),
        "rec": _group("rec", "grpo", advantage_args=_frozen(normalize_std=False)),
        "sppo": _group("sppo", "opmd", min_group=1),
        "rloo": _group("ppo", "rloo"),
        "remax": _group("ppo", "remax"),
        "reinforce++": Preset("ppo", None, token_advantage="reinforce_plus_plus", reference="if_beta"),
        "reinforce++_baseline": Preset(
            "ppo",
            None,
            token_advantage="reinforce_plus_plus",
            token_advantage_args=_frozen(baseline=True),
            reference="if_beta",
            min_group=2,
            repeat_times=8,
        ),
        "gigpo": _group("ppo", "gigpo"),
        "dpo": _preferences("dpo", reference="always"),
        "ipo": _preferences("ipo", reference="always"),
        "hinge": _preferences("hinge", reference="always"),
        "kto": _preferences("kto", reference="always"),
        "simpo": _preferences("simpo"),
        "orpo": _preferences("orpo"),
        "sft": Preset("sft", None, trains_on="demonstrations", needs_reward=False),
        "rft": Preset("sft", None, repeat_times=8, reward_threshold=1.0),
        "on_policy_distill": Preset("ppo", None, token_advantage="on_policy_distill", teacher=True, needs_reward=False),
        "gkd": Preset("gkd", None, teacher=True, needs_reward=False),
        "mix": _group("mix", "grpo", reference="never", experts=True),
    }
)


def preset(algorithm_type: str) -> Preset:
    """Return the preset called ``algorithm_type``; raise UserError if there is none."""
    if algorithm_type in PRESETS:
        return PRESETS[algorithm_type]
    raise UserError(unknown_name("algorithm_type", algorithm_type, PRESETS))


def choose(
    algorithm_type: str,
    *,
    advantage: str | None = None,
    advantage_args: Mapping[str, Any] | None = None,
    policy_loss: str | None = None,
    policy_loss_args: Mapping[str, Any] | None = None,
    loss_agg_mode: str | None = None,
    correction: Literal["bypass", "decoupled"] | None = None,
) -> Preset:
    """Return the preset ``algorithm_type`` with some parts replaced; None keeps the preset's part.

    ``advantage`` names an advantage from rewards or a token advantage of the trainer; it determines the group size and
    whether a critic and a teacher are needed. ``advantage_args`` and ``policy_loss_args`` go to the functions in use;
    the preset's arguments apply only to the preset's own functions. Another loss has the ``correction`` of the preset
    that is named like it, or else ``bypass``. Another loss of preference pairs has the ``reference`` of its preset.
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
        correction=correction or _correction(base, loss),
        reference=_reference(base, loss),
    )
    return _with_advantage(chosen, algorithm_type, advantage, advantage_args or {})


def _correction(base: Preset, policy_loss: str) -> Literal["bypass", "decoupled"]:
    """The correction of a loss: that of ``base`` for its own loss, else that of the preset named like the loss."""
    if policy_loss == base.policy_loss:
        return base.correction
    return PRESETS[policy_loss].correction if policy_loss in PRESETS else "bypass"


def _reference(base: Preset, policy_loss: str) -> Literal["never", "if_beta", "always"]:
    """When a reference model is loaded: for another loss of preference pairs as the preset named like the loss says."""
    named = PRESETS.get(policy_loss)
    both_pairs = base.trains_on == "preferences" and named is not None and named.trains_on == "preferences"
    return named.reference if named is not None and both_pairs else base.reference


def _with_advantage(chosen: Preset, algorithm_type: str, advantage: str | None, args: Mapping[str, Any]) -> Preset:
    name = advantage or chosen.advantage or chosen.token_advantage
    if name is None:
        if args:
            raise UserError(
                f"algorithm.advantage_fn_args {sorted(args)}: {algorithm_type} uses no advantage; remove them"
            )
        return chosen
    if chosen.trains_on != "rollouts":
        raise UserError(f"algorithm.advantage_fn {name!r}: {algorithm_type} trains on {chosen.trains_on}: remove it")
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
    token_entry = check_token_advantage(name, options)
    return _with(
        chosen, own, advantage=None, advantage_args={}, token_advantage=name, token_advantage_args=options,
        critic=token_entry.critic, teacher=token_entry.teacher, needs_reward=token_entry.rewards,
        min_group=2 if options.get("baseline") else 1,
    )  # fmt: skip


def _with(chosen: Preset, own: bool, **changes: Any) -> Preset:
    """Apply ``changes``. An advantage that is not the preset's ``own`` also sets the need of rewards and of groups."""
    if not own:
        changes = {"needs_reward": True, "teacher": chosen.policy_loss == "gkd", **changes}
        changes["repeat_times"] = max(chosen.repeat_times, 8 if changes["min_group"] > 1 else 1)
    return replace(chosen, **changes)
