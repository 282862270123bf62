"""Make the text of ``rft run --dry-run``: training, processes, devices, batch sizes, order of the launches, notices."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rft_platform.config.findings import Finding
from rft_platform.config.gpu_placement import GpuPlacement, engine_kind, place
from rft_platform.config.memory_plan import memory_lines
from rft_platform.config.resolve import Batches, RunLength, RunSettings
from rft_platform.config.schema.buffer import Taskset
from rft_platform.config.schema.rft_config import RftConfig


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The resolved plan of a run."""

    title: str
    sections: dict[str, list[str]]  # lines by heading
    home: str | None = None  # the project's folder
    findings: tuple[Finding, ...] = ()  # warnings and notes of the checks


def run_plan(
    run: RunSettings, *, gpu_count: int, task_count: int | None = None, gpu_bytes: int | None = None
) -> RunPlan:
    """The plan of a run on a machine with ``gpu_count`` GPUs, the smallest of which has ``gpu_bytes``."""
    config, rounds, explores = run.config, run.offline is None, run.config.explores
    algorithm, model = config.algorithm.algorithm_type, config.model.model_path
    batches = _batch_lines(run.batches, run.length(task_count)) if explores and not config.online else []
    sections = {
        "tasks": _tasksets(config) if rounds else [],
        "training": list(_training(run)) if config.trains else [],
        "processes": list(_processes(run, gpu_count)),
        "memory": memory_lines(run, gpu_count, gpu_bytes),
        "batches": batches,
        "order": _waits(run) if rounds else _offline_waits(config),
    }
    return RunPlan(f"{config.project}/{config.name}: mode {config.mode}, {algorithm} on {model}", sections)


def render_plan(plan: RunPlan) -> str:
    """The plan as text for a terminal."""
    lines = [plan.title, *([] if plan.home is None else [f"RFT_HOME {plan.home}"])]
    for heading, section_lines in {**plan.sections, "notices": plan.findings}.items():
        if section_lines:
            lines += ["", heading, *(f"  {line}" for line in section_lines)]
    return "\n".join(lines) + "\n"


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


def _processes(run: RunSettings, gpu_count: int) -> Iterator[str]:
    config, device = run.config, "cuda" if gpu_count else "cpu"
    if config.mode != "train" or (run.offline is not None and config.buffer.explorer_input.eval_tasksets):
        kind, serving = engine_kind(config, gpu_count), config.explorer.rollout_model
        size = serving.tensor_parallel_size if kind == "vllm" else 1
        engine_device = device if config.engine.device == "auto" else config.engine.device
        if config.engine.urls:
            yield f"engine     {', '.join(config.engine.urls)}, {serving.engine_num} x elsewhere"
        else:
            yield f"engine     {kind} engine, {serving.engine_num * size} x {engine_device}"
        for policy in config.policies:
            yield f"policy     {policy.name}, {kind} engine, {size} x {engine_device}"
        for model in config.explorer.auxiliary_models:
            where = "1 x elsewhere" if model.base_url else f"{max(model.devices, 1)} x {engine_device}"
            yield f"auxiliary  {model.known_as}, {model.base_url or kind + ' engine'}, {where}"
    if config.trains:
        where = _trainer_gpus(place(config, gpu_count)) if gpu_count and config.cluster.kind == "local" else ""
        yield f"trainer    torchrun worker group, {config.trainer.nproc} x {device}{where}"
    if config.online and config.mode != "train":
        address = f"{config.explorer.listen_address}:{config.explorer.proxy_port}"
        yield f"service    online service at {address}, 1 x cpu"


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
        waits.append(
            _evaluated(config, f"{_every(config.evaluation.every, 'round')}, and after the last, the new policy")
        )
    return waits


def _evaluated(config: RftConfig, what: str) -> str:
    """The line about evaluations; ``what`` names when, and which policy."""
    held_out = config.buffer.explorer_input.eval_tasksets
    return f"{what} is evaluated" if held_out else "no policy is evaluated: there are no eval_tasksets"


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
        waits.append(_evaluated(config, f"{evaluated} trained, and after the last, the policy"))
    return waits
