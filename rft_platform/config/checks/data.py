"""Check operators, dynamic sampling and task selectors: refuse keys that would have no effect."""

from collections.abc import Iterator

from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.rft_config import RftConfig

_OPERATORS = "data_processor.experience_pipeline.operators"
#: Each key of ``algorithm.filters`` and the operator that does the same.
_REPLACED = {
    "zero_variance": "dynamic_sampling",
    "max_batches": "dynamic_sampling",
    "overlong": "overlong_penalty",
    "reward_threshold": "reward_filter",
}


def data_problems(run: RunSettings) -> Iterator[str]:
    """One line for each key that would have no effect or does not fit the algorithm."""
    config, preset = run.config, run.algorithm
    name, operators = config.algorithm.algorithm_type, config.data_processor.experience_pipeline.operators
    if operators and preset.trains_on != "rollouts":
        yield f"{_OPERATORS}: {name} trains on {preset.trains_on} and has no rewards to process; remove {_OPERATORS}"
    sampled = [index for index, entry in enumerate(operators) if entry.name == "dynamic_sampling"]
    runs = run.batches.repeat_times
    for index in sampled if runs < 2 else ():
        yield (
            f"{_OPERATORS}[{index}]: dynamic_sampling compares the runs of a task, and a task has only {runs} run; set "
            "algorithm.repeat_times to 2 or more, or leave out the operator"
        )
    filters = config.algorithm.filters
    for key, replaced in _REPLACED.items():
        if getattr(filters, key) != getattr(type(filters)(), key) and any(
            entry.name == replaced for entry in operators
        ):
            yield f"algorithm.filters.{key}: the operator {replaced} of {_OPERATORS} does the same; keep one of the two"
    if filters.max_batches is not None and not sampled and not preset.drop_zero_variance:
        yield (
            "algorithm.filters.max_batches: no filter drops groups without a learning signal, so no group needs to be "
            "replaced; set algorithm.filters.zero_variance: true, or leave out max_batches"
        )
    yield from _selector_problems(config)


def _selector_problems(config: RftConfig) -> Iterator[str]:
    for key, taskset in config.buffer.explorer_input.explored.items():
        chosen = taskset.task_selector
        if chosen.feature_keys and chosen.selector_type not in ("easy_to_hard", "difficulty_based"):
            yield (
                f"{key}.task_selector.feature_keys: {chosen.selector_type} does not use the difficulty of tasks; leave "
                "it out"
            )
