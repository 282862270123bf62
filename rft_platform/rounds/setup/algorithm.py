"""The operators of the pipeline of judged experiences, and checks of the algorithm.

Refused are operators that do not exist or fit, parts that do not fit together, and parts that would have no effect.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rft_platform.algorithms.advantages.registry import ADVANTAGES
from rft_platform.algorithms.presets import Preset
from rft_platform.common.errors import UserError
from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.algorithm import RolloutCorrection
from rft_platform.judging.execution.experience_pipeline import Operator, Pipeline, experiences_of
from rft_platform.judging.operators.filters import DYNAMIC_SAMPLING, REWARD_FILTER, STD_FILTER, SURPLUS_GROUPS
from rft_platform.judging.operators.rewards import OVERLONG_PENALTY

if TYPE_CHECKING:
    from rft_platform.algorithms.losses.registry import PolicyLoss


_CACHE_SHARE = 5  # maximum length divided by cache length, as in DAPO: 20,480 and 4,096 tokens


def pipeline_of(run: RunSettings) -> Pipeline:
    """The operators applied to a round's judged experiences before advantages are computed, in order.

    A configured operator replaces the algorithm's operator of the same name. Raises UserError for unknown names and
    options.
    """
    given = run.config.data_processor.experience_pipeline.operators
    named = {entry.name for entry in given}
    own = [entry for entry in _own_operators(run) if entry.name not in named]
    pipeline = Pipeline.of([*own, *given])
    if run.batches.max_batches == 1:
        return pipeline
    return Pipeline.of([*pipeline.operators, Operator(SURPLUS_GROUPS)])


def check_operators(run: RunSettings) -> None:
    """Raise UserError for operators that do not exist and for options that do not fit."""
    nothing = experiences_of([], [])
    pipeline = pipeline_of(run)
    for entry, function in zip(pipeline.operators, pipeline.functions, strict=True):
        if function.__module__.startswith("rft_platform."):  # with an empty batch these only check their options
            function(nothing, **entry.args)


def _own_operators(run: RunSettings) -> Iterator[Operator]:
    """The algorithm's operators: those of its preset, with the overrides of section ``filters``."""
    config, chosen, overlong = run.config, run.algorithm, run.config.algorithm.filters.overlong
    if chosen.drop_zero_variance:
        yield Operator(DYNAMIC_SAMPLING, {"max_batches": chosen.max_batches})
    if chosen.overlong_penalty:
        longest = overlong.max_length or config.model.response_limit
        cache = overlong.cache_length or max(1, longest // _CACHE_SHARE)
        lengths = {"max_length": longest, "cache_length": cache}
        yield Operator(OVERLONG_PENALTY, {**lengths, "weight": chosen.overlong_penalty})
    if chosen.reward_threshold is not None:
        yield Operator(REWARD_FILTER, {"threshold": chosen.reward_threshold})
    threshold = _std_threshold(chosen)
    if threshold is not None:
        yield Operator(STD_FILTER, {"threshold": threshold})


def _std_threshold(chosen: Preset) -> float | None:
    """The standard deviation at or below which the advantage drops a group; None if it has no such threshold."""
    option = ADVANTAGES.get(chosen.advantage).drops_at if chosen.advantage else None
    return chosen.advantage_args.get(option) if option else None


_PLAIN = RolloutCorrection()


def check_algorithm(run: RunSettings) -> None:
    """Raise UserError if a part of the algorithm does not exist, does not fit the other parts, or would have no effect.

    An unchanged preset is not checked. If parts are replaced, losses are looked up by name, which imports torch.
    """
    settings = run.config.algorithm
    replaced = (
        settings.advantage_fn,
        settings.policy_loss_fn,
        settings.policy_loss_fn_args,
        settings.loss_agg_mode,
        settings.plugins,
    )
    if not any(replaced) and _is_plain(settings.rollout_correction):
        return
    from rft_platform.algorithms.losses.registry import bind

    loss = bind(run.spec.policy_loss, run.spec.policy_loss_args)
    problems = [
        *_advantage_problems(run, loss),
        *_teacher_problems(run, loss),
        *_pair_problems(run, loss),
        *_data_problems(run, loss),
        *_correction_problems(run, loss),
    ]
    if problems:
        raise UserError("\n".join(problems))


def _is_plain(correction: RolloutCorrection) -> bool:
    """Whether the section ``rollout_correction`` has its default values; mode ``bypass`` is a default, too."""
    return correction.model_copy(update={"mode": None}) == _PLAIN and correction.mode in (None, "bypass")


def _advantage_problems(run: RunSettings, loss: "PolicyLoss") -> Iterator[str]:
    """A loss that needs advantages without any; an advantage that the loss does not read."""
    settings, chosen, name = run.config.algorithm, run.algorithm, run.spec.policy_loss
    if loss.policy_gradient and chosen.advantage is None and chosen.token_advantage is None:
        yield (
            f"algorithm.policy_loss_fn {name} needs advantages and {settings.algorithm_type} computes none: set "
            "algorithm.advantage_fn"
        )
    if settings.advantage_fn is not None and not loss.policy_gradient:
        yield f"algorithm.advantage_fn {settings.advantage_fn}: the loss {name} reads no advantage; leave it out"


def _teacher_problems(run: RunSettings, loss: "PolicyLoss") -> Iterator[str]:
    """A loss that needs a teacher without one; a teacher that the loss does not use."""
    chosen, kind, name = run.algorithm, run.config.algorithm.algorithm_type, run.spec.policy_loss
    if loss.teacher and not chosen.teacher:
        yield f"algorithm.policy_loss_fn {name} learns from a teacher, and {kind} has none: set algorithm_type: gkd"
    if chosen.teacher and chosen.token_advantage is None and not loss.teacher:
        yield (
            f"algorithm.policy_loss_fn {name} learns nothing from the teacher of {kind}: leave it out, or set an "
            "algorithm_type without a teacher"
        )


def _pair_problems(run: RunSettings, loss: "PolicyLoss") -> Iterator[str]:
    """A loss of pairs without pairs, or the reverse; a loss that needs a reference model where none is loaded."""
    chosen, kind, name = run.algorithm, run.config.algorithm.algorithm_type, run.spec.policy_loss
    if loss.whole_groups and chosen.trains_on != "preferences":
        yield f"algorithm.policy_loss_fn {name} compares pairs: set algorithm_type: dpo"
    elif loss.reference and chosen.reference != "always" and not run.spec.beta:
        yield (
            f"algorithm.policy_loss_fn {name} needs a reference model, and {kind} loads none: set algorithm_type: dpo "
            "for pairs, or algorithm.kl_loss_fn_args.kl_coef"
        )
    if chosen.trains_on == "preferences" and not loss.whole_groups:
        yield (
            f"algorithm.policy_loss_fn {name} does not compare pairs, and {kind} trains on pairs: leave it out, or set "
            "the algorithm_type of the loss"
        )


def _data_problems(run: RunSettings, loss: "PolicyLoss") -> Iterator[str]:
    """Demonstrations that do not fit the loss; an aggregation that changes the loss's objective."""
    chosen, name = run.algorithm, run.spec.policy_loss
    if run.spec.expert_weight is not None and not loss.experts:
        yield (
            f"algorithm.experts: the loss {name} cannot train on demonstrations mixed with rollouts; leave out "
            "algorithm.policy_loss_fn, whose default is mix, or set another algorithm_type without experts"
        )
    if loss.loss_agg_modes is not None and chosen.loss_agg_mode not in loss.loss_agg_modes:
        yield (
            f"algorithm.loss_agg_mode is {chosen.loss_agg_mode}, which changes the objective of the loss {name}: "
            f"set it to {' or '.join(loss.loss_agg_modes)}"
        )


def _correction_problems(run: RunSettings, loss: "PolicyLoss") -> Iterator[str]:
    """Options of ``rollout_correction`` that the loss does not use."""
    correction, name = run.config.algorithm.rollout_correction, run.spec.policy_loss
    weighted = run.algorithm.correction == "decoupled" or loss.correction == "weight"
    used = {"weight_cap": weighted or run.spec.beta > 0, "weight_level": weighted, "weight_bound": weighted}
    for key, effect in used.items():
        if getattr(correction, key) != getattr(_PLAIN, key) and not effect:
            yield (
                f"algorithm.rollout_correction.{key} has no effect on the loss {name} in mode bypass: its own ratio "
                "corrects; set mode: decoupled, or leave it out"
            )
    if correction.sequence_mask_ratio != _PLAIN.sequence_mask_ratio and correction.sequence_mask is None:
        yield (
            "algorithm.rollout_correction.sequence_mask_ratio has no effect without sequence_mask: set sequence_mask, "
            "or leave it out"
        )
    if not _is_plain(correction) and not loss.policy_gradient:
        yield f"algorithm.rollout_correction: the loss {name} uses no log-probs of the engine; leave it out"
