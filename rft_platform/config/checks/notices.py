"""Find settings that are accepted but have no effect, or that are perhaps not intended."""

from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec

from rft_platform.config.checks.machine import Machine
from rft_platform.config.findings import Finding, warning
from rft_platform.config.gpu_placement import engine_kind
from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.buffer import WeightedJudge
from rft_platform.config.schema.evaluation import METRIC_SINKS
from rft_platform.config.schema.rft_config import RftConfig

_STORAGE_TYPE = "buffer.trainer_input.experience_buffer.storage_type"
_NO_EFFECT = {
    "synchronizer.sync_method": "the engine loads weights from checkpoint files",
    "explorer.service_status_check_interval": "the service looks for new versions of its RFT_HOME twice a second",
    _STORAGE_TYPE: "experiences are stored as files",
}

_RELATIVE_JUDGES = ("pairwise", "ranking")  # they compare the runs of a task with each other
_VLLM_ONLY = ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")


def without_effect(run: RunSettings) -> Iterator[Finding]:
    """One line for each setting that the user changed and that has no effect."""
    config = run.config
    yield from map(warning, config.notices)
    yield from _ignored_keys(config)
    algorithm = config.algorithm
    if algorithm.kl_loss_fn is not None and algorithm.beta == 0:
        yield warning("algorithm.kl_loss_fn has no effect while kl_loss_fn_args.kl_coef is 0")
    if algorithm.kl_loss_fn == "k1" and algorithm.beta:
        yield warning("algorithm.kl_loss_fn k1 has no gradient in expectation as a loss: k2 has the gradient of the KL")
    if algorithm.kl_penalty_fn is not None and algorithm.kl_penalty_fn_args.kl_coef == 0:
        yield warning("algorithm.kl_penalty_fn has no effect while kl_penalty_fn_args.kl_coef is 0")
    yield from _unused_ends(run)
    if config.monitor.otlp_endpoint is not None and not config.monitor.traces:
        yield warning("monitor.otlp_endpoint has no effect while monitor.traces is 0: that is how many runs it gets")
    on_one_node = config.cluster.kind == "local" and config.trainer.rendezvous.endpoint is None
    if config.cluster.node_num > 1 and on_one_node:
        yield warning("cluster.node_num has no effect on training here while trainer.rendezvous.endpoint is not set")
    if config.trainer.gradient_accumulation_steps > 1 and config.buffer.train_batch_size in (None, "round"):
        yield warning("trainer.gradient_accumulation_steps has no effect: a step already uses a whole explore batch")
    for index, taskset in enumerate(config.buffer.explorer_input.eval_tasksets):
        if taskset.task_selector != type(taskset.task_selector)():
            key = f"buffer.explorer_input.eval_tasksets[{index}].task_selector"
            yield warning(f"{key} has no effect here: an evaluation runs every task")
        yield from _relative_judges(f"buffer.explorer_input.eval_tasksets[{index}]", taskset.judge)
    explored = config.buffer.explorer_input.explored
    for key, taskset in explored.items():
        if len(explored) == 1 and taskset.weight is not None:
            why = "it is the share among several tasksets, and this is the only one"
            yield warning(f"{key}.weight has no effect here: {why}")
    yield from _single_call(config)


def _relative_judges(key: str, judge: str | list[WeightedJudge] | None) -> Iterator[Finding]:
    """One line for each judge of held-out tasks that compares the runs of one task by one policy."""
    names = [part.judge for part in judge] if isinstance(judge, list) else [judge]
    for name in dict.fromkeys(names):
        if name in _RELATIVE_JUDGES:
            yield warning(
                f"{key}.judge {name} compares the runs of a task with each other, so a single run (a greedy run always "
                "is one) gets 0.5, and rewards of two policies cannot be compared: set another judge for held-out "
                "tasks, such as math, numeric or llm"
            )


def _unused_ends(run: RunSettings) -> Iterator[Finding]:
    """One line for each end of a decay of the learning rate that is set although the rate is constant."""
    for key, optimizer in run.optimizers.items():
        if optimizer.total_steps is not None and optimizer.lr_scheduler_type == "constant":
            yield warning(
                f"{key}.total_steps has no effect while lr_scheduler_type is constant: it is the step at which the "
                "decay of linear and cosine ends"
            )


def without_effect_here(run: RunSettings, machine: Machine) -> Iterator[Finding]:
    """One line for each setting that has no effect on this machine."""
    config, serving = run.config, run.config.explorer.rollout_model
    if engine_kind(config, machine.gpus) == "transformers":
        for key in _VLLM_ONLY:
            if _value(serving, key) != _value(_DEFAULT.explorer.rollout_model, key):
                yield warning(f"explorer.rollout_model.{key} has no effect with the transformers engine")
    if machine.gpus == 0 and (declared := config.cluster.gpu_per_node):
        yield warning(f"cluster.gpu_per_node {declared}: this machine has no GPU, so the CPU is used")
        if serving.engine_num > 1:
            yield warning(f"explorer.rollout_model.engine_num {serving.engine_num}: these engines share the CPU")
    for name in config.monitor.monitor_type:
        ours = [
            point for point in entry_points(group=METRIC_SINKS, name=name) if point.module.startswith("rft_platform.")
        ]
        if ours and find_spec(name) is None:  # the package, the extra and the destination have the same name
            yield warning(
                f"monitor.monitor_type {name} has no effect here: its package is not installed; run pip install "
                f"'rft-platform[{name}]'"
            )


def _ignored_keys(config: RftConfig) -> Iterator[Finding]:
    """One line for each key that no part of the platform reads in this mode."""
    reasons = dict(_NO_EFFECT)
    if config.mode == "serve" and config.checkpoint_root_dir is not None:
        del reasons["explorer.service_status_check_interval"]
    if config.mode not in ("explore", "train"):
        reasons["synchronizer.sync_timeout"] = "a launch starts when its inputs exist, without a time limit"
    if config.online:
        del reasons[_STORAGE_TYPE]
    else:
        for key in ("listen_address", "proxy_port"):
            reasons[f"explorer.{key}"] = "it is for the online service (rft serve)"
    for key, reason in reasons.items():
        if _value(config, key) != _value(_DEFAULT, key):
            yield warning(f"{key} has no effect here: {reason}")


def _single_call(config: RftConfig) -> Iterator[Finding]:
    """One line for each setting that has no effect because the workflows make a single call."""
    explored, explorer = config.buffer.explorer_input.explored.values(), config.explorer
    if not explored or any(taskset.workflow != "single_turn" for taskset in explored):
        return
    settings = {
        "explorer.over_rollout": explorer.over_rollout.ratio > 0,
        "explorer.dynamic_timeout": explorer.dynamic_timeout.enable,
        "explorer.workers": explorer.workers.kind == "process",
    }
    for key, is_set in settings.items():
        if is_set:
            yield warning(f"{key} has no effect on workflow single_turn: the engine gets its runs as one batch")


def _value(section: object, key: str) -> object:
    for name in key.split("."):
        section = getattr(section, name)
    return section


_DEFAULT = RftConfig()


def unusual_length(run: RunSettings, task_count: int | None) -> Iterator[Finding]:
    """One line for each setting of the run's length or of a batch that is valid but perhaps not intended."""
    config, batches, end = run.config, run.batches, run.config.trainer.total_steps
    length = run.length(task_count) if config.explores else None
    if length is None:
        return
    if end is not None and end != length.steps:
        yield warning(
            f"trainer.total_steps {end}: the run has {length.steps} optimiser steps, {batches.steps_a_round} in each "
            f"of {length.rounds} rounds"
        )
    for key, optimizer in run.optimizers.items():
        start = run.critic_only_steps if optimizer is config.algorithm.optimizer else 0
        scheduled, which = length.steps - start, " that train the policy" if start else ""
        if (steps := optimizer.lr_warmup_steps) >= scheduled:
            yield warning(
                f"{key}.lr_warmup_steps {steps} is not less than the {max(scheduled, 0):,} steps of the run{which}: "
                "the learning rate rises until the end"
            )
    if task_count is not None and (size := batches.batch_size) > task_count:
        yield warning(f"buffer.batch_size {size} is more than the {task_count} tasks: a batch repeats tasks")
