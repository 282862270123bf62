"""Make the text of ``rft run --dry-run``: processes, devices, batch sizes, the order of the launches, and notices.

A notice is one line about a setting that is accepted but has no effect, or that is perhaps not intended.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rft_platform.config.gpu_placement import GpuPlacement, engine_kind, place
from rft_platform.config.memory_plan import memory_lines
from rft_platform.config.resolve import Batches, RunLength, RunSettings
from rft_platform.config.schema.buffer import Taskset
from rft_platform.config.schema.rft_config import RftConfig


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A long-lived process, or group of processes, that a run needs."""

    name: str
    what: str
    device: str
    count: int
    where: str = ""  # which GPUs, if this machine has several


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The resolved plan of a run."""

    title: str
    processes: tuple[ProcessPlan, ...]
    batches: Batches | None  # None: the run does not explore
    length: RunLength | None  # None: the run does not explore, or the number of tasks is not known
    waits: tuple[str, ...]
    notices: tuple[str, ...]
    tasksets: tuple[str, ...] = ()  # one line for each task dataset: how it is used
    home: str | None = None  # the project's folder
    memory: tuple[str, ...] = ()  # one line for each process that uses a GPU
    training: tuple[str, ...] = ()  # what is trained, and by which loss; empty: the run does not train


def run_plan(
    run: RunSettings, *, gpu_count: int, task_count: int | None = None, gpu_bytes: int | None = None
) -> RunPlan:
    """The plan of a run on a machine with ``gpu_count`` GPUs, the smallest of which has ``gpu_bytes``."""
    config, offline, exploring = run.config, run.offline, run.config.mode in ("both", "explore", "colocate")
    serves = config.mode != "train" or (offline is not None and bool(config.buffer.explorer_input.eval_tasksets))
    algorithm, model = config.algorithm.algorithm_type, config.model.model_path
    length = run.length(task_count) if exploring else None
    return RunPlan(
        title=f"{config.project}/{config.name}: mode {config.mode}, {algorithm} on {model}",
        processes=tuple(_processes(config, gpu_count, serves)),
        batches=run.batches if exploring and not config.online else None,
        length=length,
        waits=tuple(_waits(run) if offline is None else _offline_waits(config)),
        notices=(*config.notices, *config_notices(config, gpu_count), *_length_notices(run, length, task_count)),
        tasksets=tuple(_tasksets(config)) if offline is None else (),
        memory=tuple(memory_lines(run, gpu_count, gpu_bytes)),
        training=tuple(_training(run)) if config.mode in ("both", "train", "colocate") else (),
    )


def render_plan(plan: RunPlan) -> str:
    """The plan as text for a terminal."""
    lines = [plan.title, *([] if plan.home is None else [f"RFT_HOME {plan.home}"])]
    if plan.tasksets:
        lines += ["", "tasks", *(f"  {line}" for line in plan.tasksets)]
    if plan.training:
        lines += ["", "training", *(f"  {line}" for line in plan.training)]
    lines += ["", "processes"]
    lines += [f"  {each.name:<10} {each.what}, {each.count} x {each.device}{each.where}" for each in plan.processes]
    if plan.memory:
        lines += ["", "memory", *(f"  {line}" for line in plan.memory)]
    if plan.batches is not None:
        lines += ["", "batches", *(f"  {line}" for line in _batch_lines(plan.batches, plan.length))]
    lines += ["", "order", *(f"  {wait}" for wait in plan.waits)]
    if plan.notices:
        lines += ["", "notices", *(f"  {notice}" for notice in plan.notices)]
    return "\n".join(lines) + "\n"


def _length_notices(run: RunSettings, length: RunLength | None, task_count: int | None) -> Iterator[str]:
    """One line for each setting of the run's length or of a batch that is valid but perhaps not intended."""
    if length is None:
        return
    config, batches, end = run.config, run.batches, run.config.trainer.total_steps
    if end is not None and end != length.steps:
        yield (
            f"trainer.total_steps {end}: the run has {length.steps} optimiser steps, {batches.steps_a_round} in each "
            f"of {length.rounds} rounds"
        )
    warm_ups = {"algorithm.optimizer": config.algorithm.optimizer.lr_warmup_steps}
    if run.algorithm.critic:
        warm_ups["algorithm.critic"] = config.algorithm.critic.lr_warmup_steps
    for key, steps in warm_ups.items():
        if steps >= length.steps:
            yield (
                f"{key}.lr_warmup_steps {steps} is not less than the {length.steps:,} steps of the "
                "run: the learning rate rises until the end"
            )
    if task_count is not None and batches.batch_size > task_count:
        yield f"buffer.batch_size {batches.batch_size} is more than the {task_count} tasks: a batch repeats tasks"


def _training(run: RunSettings) -> Iterator[str]:
    """The parts of the algorithm, as presets and keys give them, and the weights that are trained."""
    spec, lora, config = run.spec, run.lora, run.config
    arguments = ", ".join(f"{name} {value}" for name, value in spec.policy_loss_args.items() if value is not None)
    yield f"loss       {spec.policy_loss}{f' ({arguments})' if arguments else ''}, {spec.loss_agg_mode}"
    if run.offline is None:
        advantage = spec.token_advantage or run.algorithm.advantage or "none"
        yield f"advantage  {advantage}, correction {spec.correction}"
    if spec.beta:
        yield f"KL         {spec.kl_loss} to the reference model, weight {spec.beta:g}"
    if spec.critic is not None:
        start = config.model.critic_model_path or "the body of the policy"
        yield f"critic     {start}, learning rate {config.algorithm.critic.lr:g}"
    rate = f"learning rate {config.algorithm.optimizer.lr:g}"
    yield f"weights    {'all' if lora is None else f'a LoRA adapter of rank {lora.rank}, alpha {lora.alpha}'}, {rate}"


def _tasksets(config: RftConfig) -> list[str]:
    inputs, workers = config.buffer.explorer_input, config.explorer.workers
    operators = [operator.name for operator in config.data_processor.experience_pipeline.operators]
    python = workers.python or "this Python"
    runs = "in this process" if workers.kind == "inprocess" else f"in worker processes of {python}"
    lines = []
    for taskset in inputs.explored.values():
        weight = "" if taskset.weight is None else f", weight {taskset.weight:g}"
        lines += [
            f"explored   {_source(taskset)}{weight}: {_judged(taskset)}",
            f"           tasks {taskset.task_selector.selector_type}, runs {runs}, "
            f"operators {', '.join(operators) or 'none'}",
        ]
    return [*lines, *(f"held out   {_source(held)}: {_judged(held)}" for held in inputs.eval_tasksets)]


def _source(data: Taskset) -> str:
    """The location of a dataset, with its split unless it is one file."""
    return data.path if Path(data.path).is_file() else f"{data.path}, split {data.split}"


def _number(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def _every(count: int, noun: str, plural: str | None = None) -> str:
    return f"every {noun if count == 1 else _number(count, noun, plural)}"


def _judged(taskset: Taskset) -> str:
    judge = taskset.judge
    if isinstance(judge, list):
        label = " + ".join(f"{part.weight:g} {part.judge}" for part in judge)
    else:
        label = judge or "none (the workflow's own reward)"
    return f"workflow {taskset.workflow}, judge {label}"


def _processes(config: RftConfig, gpu_count: int, serves: bool) -> list[ProcessPlan]:
    device = "cuda" if gpu_count else "cpu"
    processes = []
    if serves:
        kind = engine_kind(config, gpu_count)
        serving = config.explorer.rollout_model
        count = serving.engine_num * (serving.tensor_parallel_size if kind == "vllm" else 1)
        engine_device = device if config.engine.device == "auto" else config.engine.device
        if config.engine.urls:
            processes.append(ProcessPlan("engine", ", ".join(config.engine.urls), "elsewhere", serving.engine_num))
        else:
            processes.append(ProcessPlan("engine", f"{kind} engine", engine_device, count))
        for policy in config.policies:
            label = f"{policy.name}, {kind} engine"
            processes.append(ProcessPlan("policy", label, engine_device, count // serving.engine_num))
        for model in config.explorer.auxiliary_models:
            where, count = ("elsewhere", 1) if model.base_url else (engine_device, max(model.devices, 1))
            processes.append(
                ProcessPlan("auxiliary", f"{model.known_as}, {model.base_url or kind + ' engine'}", where, count)
            )
    if config.mode in ("both", "train", "colocate"):
        where = _trainer_gpus(place(config, gpu_count)) if gpu_count else ""
        processes.append(ProcessPlan("trainer", "torchrun worker group", device, config.trainer.nproc, where))
    if config.online and config.mode != "train":
        address = f"{config.explorer.listen_address}:{config.explorer.proxy_port}"
        processes.append(ProcessPlan("service", f"online service at {address}", "cpu", 1))
    return processes


def _trainer_gpus(placement: GpuPlacement) -> str:
    if placement.shared:
        return ", on the engines' GPUs"
    if placement.trainer is None:
        return ""
    return ", GPU " + ", ".join(map(str, placement.trainer))


def _batch_lines(batches: Batches, length: RunLength | None) -> list[str]:
    least = "" if batches.exact else "at least "
    rounds = "as many as the tasks allow" if length is None else str(length.rounds)
    about = "about " if batches.dynamic else "" if batches.whole_round else least
    total = "" if length is None else f", {about}{_number(length.steps, 'optimiser step')} in all"
    steps = f"{least}{_number(batches.steps_a_round, 'optimiser step')} a round"
    baseline = " (1 greedy)" if batches.baseline_runs else ""
    passes, whole = "", "one optimiser step a round, with all its experiences"
    if batches.epochs > 1:
        passes = f" x {batches.epochs} passes"
        whole = f"{batches.epochs} optimiser steps a round, each with all its experiences"
    return [
        f"{_number(batches.batch_size, 'task')} x {_number(batches.repeat_times, 'run')}{baseline} x "
        f"{_number(batches.batches_a_round, 'batch', 'batches')} = "
        f"{least}{batches.experiences_a_round} experiences a round",
        f"{batches.train_batch_size} experiences a step, trained as soon as they are stored"
        if batches.dynamic
        else whole
        if batches.whole_round
        else f"{batches.experiences_a_round} / {batches.train_batch_size} experiences a step{passes} = {steps}",
        f"rounds: {rounds}{total}",
        *(
            [
                f"dynamic sampling: up to {batches.max_batches} batches of tasks instead of one when a batch gives no "
                "learning signal"
            ]
            if batches.max_batches > 1
            else []
        ),
    ]


def _offline_waits(config: RftConfig) -> list[str]:
    steps, buffer = config.offline_steps, config.buffer
    passes = f"{_number(buffer.total_epochs, 'pass', 'passes')} over the dataset"
    length = passes if steps is None else _number(steps, "optimiser step")
    waits = [f"training: {length}, {buffer.train_batch_size} rows a step"]
    waits += _saves(config)
    if buffer.explorer_input.eval_tasksets:
        waits.append("then the base model and the new policy are evaluated")
    return waits


def _saves(config: RftConfig) -> list[str]:
    every = config.trainer.save_interval
    return [f"a checkpoint every {every} steps, from which an interrupted training resumes"] if every else []


def _waits(run: RunSettings) -> list[str]:
    config, sync = run.config, run.config.synchronizer
    if config.online:
        return _online_waits(config, run.batches.experiences_a_round)
    if config.mode == "train":
        return [f"a step waits for {config.buffer.train_batch_size} experiences", *_saves(config)]
    if config.mode == "bench":
        return ["every policy of the project without a result is evaluated, the starting policy first"]
    waits = ["round 1 explores when the warm start has ended"] if config.warm_start else []
    if sync.dynamic:
        return [*waits, *_dynamic_waits(config)]
    ahead = sync.offset_rounds
    waits.append(
        "round k explores when round k-1 has trained"
        if ahead == 0
        else f"round k explores when round k-{1 + ahead} has trained: {_number(ahead, 'round')} ahead of training"
    )
    if config.mode != "explore":
        waits.append("round k trains when its exploration has ended and round k-1 has trained")
        waits.append(f"{_every(config.evaluation.every, 'round')}, and after the last, the new policy is evaluated")
    return waits


def _online_waits(config: RftConfig, rows: int) -> list[str]:
    """Lines that say when an online project records, collects and trains; a round has ``rows`` rows."""
    waits = []
    if config.mode != "train":
        every = config.service.commit_interval_s
        waits.append("clients send chat requests, and POST /feedback with the reward of their answers")
        waits.append(
            "rated rows are used for training after a client sends POST /commit"
            + ("" if every is None else f", or after at most {every:g} s")
        )
    if config.mode == "serve":
        place = config.checkpoint_root_dir
        whose = "this RFT_HOME at once" if place is None else f"this RFT_HOME at once, those of another host by {place}"
        return [*waits, f"the service takes new versions of {whose}; another process trains them"]
    waits.append(f"round k collects rows when {rows} are committed and round k-1 has trained, then trains on them")
    return [*waits, "then the engine takes the new weights; requests wait meanwhile", *_saves(config)]


def _dynamic_waits(config: RftConfig) -> list[str]:
    sync, interval = config.synchronizer, config.synchronizer.sync_interval
    by_trainer = sync.sync_style == "dynamic_by_trainer"
    ahead = f"at most {_number(sync.sync_offset, 'batch', 'batches')} ahead" if sync.sync_offset else "without waiting"
    newer = 1 if by_trainer else interval
    waits = [
        f"explore batches follow one another {ahead}; after every {'one' if newer == 1 else newer} of them the engine "
        "loads newer weights, if there are any"
    ]
    if sync.max_staleness is not None:
        waits.append(f"rows more than {_number(sync.max_staleness, 'policy version')} old are not trained")
    if config.mode != "explore":
        steps = _number(interval, "step") if by_trainer else "one step"
        waits.append(
            f"a training starts as soon as the experiences of {steps} are stored; the rest is trained when exploration "
            "ends"
        )
        evaluated = _every(config.evaluation.every, "explore batch", "explore batches")
        waits.append(f"{evaluated} trained, and after the last, the policy is evaluated")
    return waits


_STORAGE_TYPE = "buffer.trainer_input.experience_buffer.storage_type"
_NO_EFFECT = {
    "synchronizer.sync_method": "the engine loads weights from checkpoint files",
    "explorer.service_status_check_interval": "the service looks for new versions of its RFT_HOME twice a second",
    _STORAGE_TYPE: "experiences are stored as files",
}

_VLLM_ONLY = ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")


def config_notices(config: RftConfig, gpu_count: int | None = None) -> list[str]:
    """One line for each setting that the user changed and that has no effect.

    ``gpu_count``: GPUs of this machine; None: unknown, and lines that depend on this number are left out.
    """
    reasons = dict(_NO_EFFECT)
    if config.mode == "serve" and config.checkpoint_root_dir is not None:
        del reasons["explorer.service_status_check_interval"]
    if config.mode not in ("explore", "train"):
        reasons["synchronizer.sync_timeout"] = "a launch starts when its inputs exist, without a time limit"
    lines = [
        f"{key} has no effect here: {reason}"
        for key, reason in reasons.items()
        if _value(config, key) != _value(_DEFAULT, key) and not (config.online and key == _STORAGE_TYPE)
    ]
    if config.engine.kind == "transformers" or (config.engine.kind == "auto" and gpu_count == 0):
        lines += [
            f"explorer.rollout_model.{key} has no effect with the transformers engine"
            for key in _VLLM_ONLY
            if _value(config.explorer.rollout_model, key) != _value(_DEFAULT.explorer.rollout_model, key)
        ]
    if config.algorithm.kl_loss_fn is not None and config.algorithm.beta == 0:
        lines.append("algorithm.kl_loss_fn has no effect while kl_loss_fn_args.kl_coef is 0")
    if config.algorithm.kl_loss_fn == "k1" and config.algorithm.beta:
        lines.append("algorithm.kl_loss_fn k1 has no gradient in expectation as a loss: k2 has the gradient of the KL")
    if config.algorithm.kl_penalty_fn is not None and config.algorithm.kl_penalty_fn_args.kl_coef == 0:
        lines.append("algorithm.kl_penalty_fn has no effect while kl_penalty_fn_args.kl_coef is 0")
    if gpu_count == 0 and config.cluster.gpu_per_node:
        lines.append(f"cluster.gpu_per_node {config.cluster.gpu_per_node}: this machine has no GPU, so the CPU is used")
        if (engines := config.explorer.rollout_model.engine_num) > 1:
            lines.append(f"explorer.rollout_model.engine_num {engines}: these engines share the CPU")
    if config.cluster.node_num > 1 and config.trainer.rendezvous.endpoint is None:
        lines.append("cluster.node_num has no effect on training here while trainer.rendezvous.endpoint is not set")
    if config.trainer.gradient_accumulation_steps > 1 and config.buffer.train_batch_size in (None, "round"):
        lines.append("trainer.gradient_accumulation_steps has no effect: a step already uses a whole explore batch")
    for index, taskset in enumerate(config.buffer.explorer_input.eval_tasksets):
        if taskset.task_selector != type(taskset.task_selector)():
            key = f"buffer.explorer_input.eval_tasksets[{index}].task_selector"
            lines.append(f"{key} has no effect here: an evaluation runs every task")
    explored = config.buffer.explorer_input.explored
    lines += [
        f"{key}.weight has no effect here: it is the share among several tasksets, and this is the only one"
        for key, taskset in explored.items()
        if len(explored) == 1 and taskset.weight is not None
    ]
    if not config.online:
        lines += [
            f"explorer.{key} has no effect here: it is for the online service (rft serve)"
            for key in ("listen_address", "proxy_port")
            if _value(config.explorer, key) != _value(_DEFAULT.explorer, key)
        ]
    lines += _single_call_notices(config)
    lines += [
        f"monitor.monitor_type {service} has no effect here: its package is not installed; run pip install "
        f"'rft-platform[{service}]'"
        for service in config.monitor.services
        if find_spec(service) is None
    ]
    return lines


def _single_call_notices(config: RftConfig) -> Iterator[str]:
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
            yield f"{key} has no effect on workflow single_turn: the engine gets its runs as one batch"


def _value(section: object, key: str) -> object:
    for name in key.split("."):
        section = getattr(section, name)
    return section


_DEFAULT = RftConfig()
