"""The operators of the pipeline of judged experiences; ``check_operators`` refuses those that do not exist or fit."""

from collections.abc import Iterator

from rft_platform.algorithms.advantages.registry import ADVANTAGES
from rft_platform.algorithms.presets import Preset
from rft_platform.config.resolve import RunSettings
from rft_platform.judging.execution.experience_pipeline import Operator, Pipeline, experiences_of
from rft_platform.judging.operators.filters import DYNAMIC_SAMPLING, REWARD_FILTER, STD_FILTER, SURPLUS_GROUPS
from rft_platform.judging.operators.rewards import OVERLONG_PENALTY

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
