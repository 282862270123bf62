"""The experience pipeline of a project: the operators of its algorithm, then those of the configuration."""

from collections.abc import Iterator

from rft_platform.algorithms.advantages.registry import ADVANTAGES
from rft_platform.algorithms.presets import Preset
from rft_platform.config.resolve import RunSettings
from rft_platform.judging.operators.dynamic_sampling import DYNAMIC_SAMPLING
from rft_platform.judging.operators.overlong_penalty import OVERLONG_PENALTY
from rft_platform.judging.operators.reward_filter import REWARD_FILTER
from rft_platform.judging.operators.std_filter import STD_FILTER
from rft_platform.judging.operators.surplus_groups import SURPLUS_GROUPS
from rft_platform.judging.pipeline import Operator, Pipeline
from rft_platform.judging.view import experiences_of

_CACHE_SHARE = 5  # DAPO's: 4,096 of 20,480 tokens


def pipeline_of(run: RunSettings) -> Pipeline:
    """What is done with the judged experiences of a round before its advantages, in order.

    An operator of the configuration takes the place of the algorithm's own of the same name. Raises UserError for
    names and options that do not exist.
    """
    given = run.config.data_processor.experience_pipeline.operators
    named = {entry.name for entry in given}
    own = [entry for entry in _own_operators(run) if entry.name not in named]
    pipeline = Pipeline.of([*own, *given])
    if run.batches.max_batches == 1:
        return pipeline
    return Pipeline.of([*pipeline.operators, Operator(SURPLUS_GROUPS)])


def check_operators(run: RunSettings) -> None:
    """Raise UserError for operators that do not exist, and for options that do not fit."""
    nothing = experiences_of([], [])
    pipeline = pipeline_of(run)
    for entry, function in zip(pipeline.operators, pipeline.functions, strict=True):
        if function.__module__.startswith("rft_platform."):  # options that exclude each other
            function(nothing, **entry.args)


def _own_operators(run: RunSettings) -> Iterator[Operator]:
    """Those of the algorithm in force: its preset's with what section ``filters`` puts in their place."""
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
    """The standard deviation at or below which the advantage in force leaves a group out; None where it has none."""
    option = ADVANTAGES.get(chosen.advantage).drops_at if chosen.advantage else None
    return chosen.advantage_args.get(option) if option else None
