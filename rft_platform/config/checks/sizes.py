"""Refuse numbers that have a valid type but are too large for any run, and an unknown metric of the gate."""

import difflib
from collections.abc import Iterator

from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.rft_config import RftConfig

_MOST_RUNS = 10_000_000  # runs of an explore batch: memory must hold their rows
_MOST_TOKENS = 10_000_000  # tokens of a sequence
_HIGHEST_RATE = 1.0  # AdamW changes a weight by about the learning rate in a step
_GATE_METRICS = ("sampled_pass", "greedy_pass", "mean_reward", "truncated_share", "failed_runs")


def size_problems(run: RunSettings) -> Iterator[str]:
    """One line for each number that is too large to compute with."""
    config, buffer, model = run.config, run.config.buffer, run.config.model
    runs = run.batches.batch_size * run.batches.repeat_times
    if runs > _MOST_RUNS:
        yield (
            f"buffer.batch_size {buffer.batch_size:,} means {runs:,} runs a batch: expected at most "
            f"{_MOST_RUNS:,}; lower it, or algorithm.repeat_times"
        )
    if model.max_model_len is not None and model.max_model_len > _MOST_TOKENS:
        yield (
            f"model.max_model_len {model.max_model_len:,}: expected at most {_MOST_TOKENS:,} tokens; leave it out for "
            "the model's own limit"
        )
    rates = {"algorithm.optimizer.lr": config.algorithm.optimizer.lr}
    if run.algorithm.critic:
        rates["algorithm.critic.lr"] = config.algorithm.critic.lr
    if config.warm_start is not None:
        rates["warm_start.optimizer.lr"] = config.warm_start.optimizer.lr
    for key, rate in rates.items():
        if rate > _HIGHEST_RATE:
            yield f"{key} {rate:g}: expected at most {_HIGHEST_RATE:g}; 1e-6 is usual for large models"


def gate_problems(config: RftConfig) -> Iterator[str]:
    """One line if no evaluation reports the gate's metric. Names with / or @ may come from a judge and are accepted."""
    metric = config.evaluation.gate.metric
    known = [*_GATE_METRICS, *(f"{name}_{end}" for name in _GATE_METRICS[:2] for end in ("low", "high"))]
    if metric not in known and not {"/", "@"} & set(metric):
        near = difflib.get_close_matches(metric, known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        yield f"evaluation.gate.metric {metric!r}: expected one of {', '.join(_GATE_METRICS)}{meant}"
