"""Semantic checks of a configuration, made before anything starts; every problem is reported with its fix."""

import re
from collections.abc import Callable, Iterator, Sequence

from rft_platform.algorithms.presets import Preset
from rft_platform.common.errors import UserError
from rft_platform.config.checks.algorithm import algorithm_problems
from rft_platform.config.checks.data import data_problems
from rft_platform.config.checks.machine import local_problems
from rft_platform.config.checks.models import auxiliary_problems, policies_problems
from rft_platform.config.checks.sizes import gate_problems, size_problems
from rft_platform.config.checks.synchronizer import sync_problems
from rft_platform.config.checks.texts import name_problems, secret_problems
from rft_platform.config.memory_plan import memory_problems
from rft_platform.config.offline import offline_kind, offline_problems
from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.buffer import ROW_WORKFLOWS, ExplorerInput
from rft_platform.config.schema.evaluation import PAIRED_METRICS
from rft_platform.config.schema.rft_config import RftConfig

_WITHOUT_REWARD = ("single_turn", "calculator", "agentscope_react", "tool_call")
_EXPLORING = ("both", "explore", "colocate")


def check_config(run: RunSettings, *, cpu_count: int, gpu_count: int, gpu_bytes: int | None = None) -> None:
    """Raise ``UserError`` with one line for each problem.

    Args:
        run: the settings to check; their ``config`` is the configuration as loaded from the user's file.
        cpu_count: processors of this machine.
        gpu_count: CUDA devices of this machine.
        gpu_bytes: memory of its smallest GPU; None: unknown, and the memory is not checked.
    """
    config = run.config
    problems = [
        *local_problems(config, cpu_count=cpu_count, gpu_count=gpu_count),
        *name_problems(config),
        *size_problems(run),
        *gate_problems(config),
        *secret_problems(config),
        *auxiliary_problems(config),
        *_evaluation_problems(config),
        *_input_problems(config, run.algorithm),
        *offline_problems(config, run.algorithm),
        *algorithm_problems(run),
        *data_problems(run),
        *_batch_problems(run),
        *_sampling_problems(config, run.algorithm),
        *_schedule_problems(run),
        *policies_problems(run),
        *_online_problems(config),
        *_unbuilt_problems(config),
        *memory_problems(run, gpu_count, gpu_bytes),
    ]
    if problems:
        raise UserError("\n".join(problems))


def _input_problems(config: RftConfig, preset: Preset) -> Iterator[str]:
    inputs = config.buffer.explorer_input
    if config.mode in _EXPLORING and not inputs.explored and not config.online:
        yield f"buffer.explorer_input.taskset is not set: mode {config.mode} needs tasks; give it a path"
    explored = config.mode == "train" and preset.trains_on == "rollouts" and offline_kind(config, preset) is None
    if explored and not inputs.explored and not config.online:
        yield (
            "buffer.explorer_input.taskset is not set: mode train trains on the rounds of a project that explores "
            "tasks; give it the path of those tasks, or set experience_buffer.storage_type: sql for production traffic"
        )
    if config.mode == "bench" and not inputs.eval_tasksets:
        yield "buffer.explorer_input.eval_tasksets is empty: mode bench needs at least one"
    names = [taskset.known_as for taskset in inputs.eval_tasksets]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"buffer.explorer_input.eval_tasksets: two entries are called {name!r}; give each a unique name"
    yield from _mix_problems(config, inputs)
    for key, taskset in inputs.every.items():
        if taskset.format.prompt_key is None and ":" not in taskset.workflow and taskset.workflow not in ROW_WORKFLOWS:
            yield (
                f"{key}.format.prompt_key is null: the workflow {taskset.workflow} reads its question from a "
                "column; name the column, or use your own workflow, which reads the whole row"
            )
        if taskset.judge is None and taskset.judge_args:
            yield (
                f"{key}.judge_args: there is no judge to pass them to; set judge, or use reward_fn_args, "
                "which a class-style workflow reads from its task"
            )
        if taskset.judge is None and taskset.workflow in _WITHOUT_REWARD and preset.needs_reward:
            yield (
                f"{key}.judge: the workflow {taskset.workflow} computes no reward; set a judge "
                "(the default, exact_match, is for tasks with format.response_key)"
            )
    if config.warm_start and config.warm_start.stop_at is not None and not inputs.eval_tasksets:
        yield "warm_start.stop_at is a pass rate on the first of eval_tasksets, and there is none: add one"


def _mix_problems(config: RftConfig, inputs: ExplorerInput) -> Iterator[str]:
    names = [taskset.known_as for taskset in inputs.explored.values()]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"buffer.explorer_input.tasksets: two entries are called {name!r}; give each a unique name"
    unweighted = [key for key, taskset in inputs.explored.items() if taskset.weight is None]
    if 0 < len(unweighted) < len(names):
        yield (
            f"{unweighted[0]}.weight is not set, but other tasksets have a weight: set it for all of them or for none "
            "(default: the number of tasks)"
        )
    explorer = config.explorer
    derived = {
        "explorer.dynamic_timeout.enable": explorer.dynamic_timeout.enable,
        "explorer.over_rollout.ratio": explorer.over_rollout.ratio > 0,
    }
    for key, is_on in derived.items():
        if is_on and len(names) > 1:
            yield (
                f"{key}: with several tasksets it would stop the runs of the slowest one, because it compares the "
                "durations of all runs of a batch; leave it out"
            )


def _evaluation_problems(config: RftConfig) -> Iterator[str]:
    gate = config.evaluation.gate
    if gate.confident and gate.metric not in PAIRED_METRICS:
        yield (
            f"evaluation.gate.confident: scores by {gate.metric} are not stored per task; set evaluation.gate.metric "
            f"to one of {', '.join(PAIRED_METRICS)}"
        )
    if gate.needs_interval and gate.metric == "greedy_pass" and not config.evaluation.greedy:
        yield (
            "evaluation.gate.metric greedy_pass: evaluation.greedy is false, so it is not measured; "
            "set evaluation.greedy to true"
        )
    sync = config.synchronizer
    if config.restarts_after_refusal and not config.online and (sync.dynamic or sync.sync_offset or config.policies):
        yield (
            "evaluation.after_refusal restart: each round has to explore with the version that it trains; leave out "
            "policies, and set synchronizer.sync_style fixed and sync_offset 0, or evaluation.after_refusal continue"
        )


def _whole_round_problems(config: RftConfig, preset: Preset) -> Iterator[str]:
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer.enable
    counted = {
        f"mode {config.mode} explores no rounds": config.mode == "train",
        f"synchronizer.sync_style {config.synchronizer.sync_style} trains as soon as the rows of a step are stored": (
            config.synchronizer.dynamic
        ),
        "the replay buffer fills steps to a fixed size": replay,
        "demonstrations are a fixed share of a step": preset.experts
        and (config.algorithm.experts is None or config.algorithm.experts.batch_size is None),
    }
    why = [reason for reason, holds in counted.items() if holds]
    if why:
        yield f"buffer.train_batch_size round: {', and '.join(why)}; give the number of experiences of a step"


def _batch_problems(run: RunSettings) -> Iterator[str]:
    config, preset, plan = run.config, run.algorithm, run.batches
    if config.buffer.train_batch_size == "round":
        yield from _whole_round_problems(config, preset)
    if config.mode == "train" and config.buffer.train_batch_size is None:
        yield "buffer.train_batch_size is not set: mode train explores nothing, so it has no default; set it"
    if config.mode not in _EXPLORING:
        return
    if plan.repeat_times < preset.min_group:
        yield (
            f"algorithm.repeat_times is {plan.repeat_times}: {config.algorithm.algorithm_type} compares the runs "
            f"of a task, so one run gives no signal; set it to {max(preset.min_group, preset.repeat_times)}"
        )
    yield from sync_problems(run)
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer.enable  # fills short steps
    if config.synchronizer.dynamic or replay or not plan.exact:
        return
    product = (
        f"batch_size {plan.batch_size} * repeat_times {plan.repeat_times} * sync_interval {plan.batches_a_round} "
        f"= {plan.experiences_a_round}"
    )
    if plan.whole_round:
        return
    if plan.train_batch_size > plan.experiences_a_round:
        yield (
            f"buffer.train_batch_size {plan.train_batch_size} is never reached: a round has {product} "
            f"experiences; set it to {plan.experiences_a_round} or a divisor of that"
        )
    elif plan.experiences_a_round % plan.train_batch_size:
        yield (
            f"buffer.train_batch_size {plan.train_batch_size} does not divide the experiences of a round, {product}: "
            f"the last step would be smaller; set it to {_divisor(plan.experiences_a_round, plan.train_batch_size)}"
        )


def _divisor(total: int, near: int) -> int:
    """The divisor of ``total`` nearest to ``near``."""
    return min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: abs(n - near))


def _sampling_problems(config: RftConfig, preset: Preset) -> Iterator[str]:
    if (preset.advantage is None and preset.token_advantage is None) or config.mode == "bench":
        return
    explored = config.buffer.explorer_input.explored
    for name, (is_whole, wanted) in _WHOLE_DISTRIBUTION.items():
        own = {f"{key}.rollout_args.{name}": getattr(each.rollout_args, name) for key, each in explored.items()}
        values = {key: value for key, value in own.items() if value is not None}
        if len(values) < len(explored) or not explored:
            values[f"model.{name}"] = getattr(config.model, name)
        for key, value in values.items():
            if is_whole(value):
                continue
            yield (
                f"{key} is {value}: {config.algorithm.algorithm_type} needs samples from the distribution that the "
                f"trainer computes, and this setting changes the engine's distribution; set it to {wanted}"
            )


_WHOLE_DISTRIBUTION: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value > 0, "1.0"),
    "top_p": (lambda value: value == 1.0, "1.0"),
    "top_k": (lambda value: value <= 0, "-1"),
}


_CRON_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_CRON_NAMES: tuple[list[str], ...] = ([], [], [], _MONTHS, ["sun", "mon", "tue", "wed", "thu", "fri", "sat"])
_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def _is_cron(text: str) -> bool:
    """Whether ``text`` has the five fields of cron: ``*``, numbers, ranges and steps, which Dagster accepts."""
    fields = [_without_names(field, names) for field, names in zip(text.split(), _CRON_NAMES, strict=False)]
    if len(text.split()) != len(_CRON_RANGES):
        return False
    starts = []
    for field, (least, most) in zip(fields, _CRON_RANGES, strict=True):
        parts = [re.fullmatch(r"(?:\*|(\d+)(?:-(\d+))?)(?:/([1-9]\d*))?", part) for part in field.split(",")]
        spans = [(int(found[1] or least), int(found[2] or found[1] or most)) for found in parts if found is not None]
        if len(spans) < len(parts) or not all(least <= first <= last <= most for first, last in spans):
            return False
        starts.append((min(first for first, _ in spans), {n for first, last in spans for n in range(first, last + 1)}))
    day, months = starts[2][0], starts[3][1]
    return fields[4] != "*" or any(day <= _DAYS[month - 1] for month in months)  # not the 30th of February


def _without_names(field: str, names: Sequence[str]) -> str:
    """``field`` with numbers instead of names of months or weekdays."""
    numbers = {name: str(number) for number, name in enumerate(names, start=int(names[:1] == ["jan"]))}
    return re.sub(r"[a-zA-Z]+", lambda found: numbers.get(found[0].lower(), found[0]), field)


def _schedule_problems(run: RunSettings) -> Iterator[str]:
    config, preset = run.config, run.algorithm
    if config.evaluation.schedule is not None and not _is_cron(config.evaluation.schedule):
        yield (
            f"evaluation.schedule {config.evaluation.schedule!r}: expected the five fields of cron (minute, hour, day, "
            "month, weekday), as in '0 3 * * *'"
        )
    if run.offline is not None:
        return  # the dataset determines the length of an offline training
    algorithm, ends = config.algorithm, run.length() is not None or config.trainer.total_steps is not None
    optimizers = {"algorithm.optimizer": algorithm.optimizer} | (
        {"algorithm.critic": algorithm.critic} if preset.critic else {}
    )
    for key, optimizer in optimizers.items():
        needs_end = optimizer.lr_scheduler_type != "constant" and optimizer.total_steps is None
        if needs_end and not ends:
            yield (
                f"{key}.lr_scheduler_type {optimizer.lr_scheduler_type} needs the end of the run: set "
                f"{key}.total_steps, trainer.total_steps or buffer.total_steps"
            )
        decays = optimizer.lr_scheduler_type != "constant"
        if optimizer.total_steps is not None and optimizer.lr_warmup_steps + decays > optimizer.total_steps:
            yield (
                f"{key}.lr_warmup_steps {optimizer.lr_warmup_steps} does not end before {key}.total_steps "
                f"{optimizer.total_steps}: lower the first, or raise the second"
            )


def _online_problems(config: RftConfig) -> Iterator[str]:
    """One line for each setting that has no meaning for rounds of production traffic."""
    if not config.online:
        return
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer.enable
    refused = {
        f"synchronizer.sync_style {config.synchronizer.sync_style}": config.synchronizer.dynamic,
        "buffer.trainer_input.experience_buffer.replay_buffer.enable": replay,
        "policies": bool(config.policies),
    }
    for key, is_set in refused.items():
        if is_set:
            yield f"{key}: rounds of production traffic take committed rows once, in the style fixed; leave it out"
    service, replicas = config.service, config.explorer.rollout_model.engine_num
    if service.weight_update == "rolling" and service.least_in_service >= replicas:
        yield (
            f"service.least_in_service {service.least_in_service}: a rolling update takes one of "
            f"{replicas} replicas out of service; lower it, or raise explorer.rollout_model.engine_num"
        )


def _unbuilt_problems(config: RftConfig) -> Iterator[str]:
    if len(config.model.lora_configs) > 1:
        yield f"model.lora_configs has {len(config.model.lora_configs)} entries: one adapter is trained at a time"
