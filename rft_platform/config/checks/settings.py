"""Check the settings of a run against each other; needs no knowledge of the machine."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence

from rft_platform.common.redaction import holds_secret, redact
from rft_platform.config.allowed_changes import flat_settings
from rft_platform.config.checks.algorithm import algorithm_problems, data_problems, loss_problems, offline_problems
from rft_platform.config.checks.batches import batch_problems, in_flight_problems
from rft_platform.config.checks.machine import Machine, local_problems
from rft_platform.config.checks.models import auxiliary_problems, policies_problems
from rft_platform.config.checks.notices import without_effect, without_effect_here
from rft_platform.config.findings import Finding, error, warning
from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.buffer import ROW_WORKFLOWS, ExplorerInput
from rft_platform.config.schema.evaluation import PAIRED_METRICS
from rft_platform.config.schema.rft_config import RftConfig

_WITHOUT_REWARD = ("single_turn", "calculator", "agentscope_react", "tool_call")


def _input_problems(run: RunSettings) -> Iterator[Finding]:
    config, preset, inputs = run.config, run.algorithm, run.config.buffer.explorer_input
    if config.explores and not inputs.explored and not config.online:
        yield error(f"buffer.explorer_input.taskset is not set: mode {config.mode} needs tasks; give it a path")
    explored = config.mode == "train" and preset.trains_on == "rollouts" and run.offline is None
    if explored and not inputs.explored and not config.online:
        yield error(
            "buffer.explorer_input.taskset is not set: mode train trains on the rounds of a project that explores "
            "tasks; give it the path of those tasks, or set experience_buffer.storage_type: sql for production traffic"
        )
    if config.mode == "bench" and not inputs.eval_tasksets:
        yield error("buffer.explorer_input.eval_tasksets is empty: mode bench needs at least one")
    names = [taskset.known_as for taskset in inputs.eval_tasksets]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield error(f"buffer.explorer_input.eval_tasksets: two entries are called {name!r}; give each a unique name")
    yield from _mix_problems(config, inputs)
    for key, taskset in inputs.every.items():
        if taskset.format.prompt_key is None and ":" not in taskset.workflow and taskset.workflow not in ROW_WORKFLOWS:
            yield error(
                f"{key}.format.prompt_key is null: the workflow {taskset.workflow} reads its question from a "
                "column; name the column, or use your own workflow, which reads the whole row"
            )
        if taskset.judge is None and taskset.judge_args:
            yield error(
                f"{key}.judge_args: there is no judge to pass them to; set judge, or use reward_fn_args, "
                "which a class-style workflow reads from its task"
            )
        if taskset.judge is None and taskset.workflow in _WITHOUT_REWARD and preset.needs_reward:
            yield error(
                f"{key}.judge: the workflow {taskset.workflow} computes no reward; set a judge "
                "(the default, exact_match, is for tasks with format.response_key)"
            )
    if config.warm_start and config.warm_start.stop_at is not None and not inputs.eval_tasksets:
        yield error("warm_start.stop_at is a pass rate on the first of eval_tasksets, and there is none: add one")


def _mix_problems(config: RftConfig, inputs: ExplorerInput) -> Iterator[Finding]:
    names = [taskset.known_as for taskset in inputs.explored.values()]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield error(f"buffer.explorer_input.tasksets: two entries are called {name!r}; give each a unique name")
    unweighted = [key for key, taskset in inputs.explored.items() if taskset.weight is None]
    if 0 < len(unweighted) < len(names):
        yield error(
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
            yield error(
                f"{key}: with several tasksets it would stop the runs of the slowest one, because it compares the "
                "durations of all runs of a batch; leave it out"
            )


def _evaluation_problems(run: RunSettings) -> Iterator[Finding]:
    config = run.config
    gate = config.evaluation.gate
    if gate.confident and gate.metric not in PAIRED_METRICS:
        yield error(
            f"evaluation.gate.confident: scores by {gate.metric} are not stored per task; set evaluation.gate.metric "
            f"to one of {', '.join(PAIRED_METRICS)}"
        )
    if gate.needs_interval and gate.metric == "greedy_pass" and not config.evaluation.greedy:
        yield error(
            "evaluation.gate.metric greedy_pass: evaluation.greedy is false, so it is not measured; "
            "set evaluation.greedy to true"
        )
    yield from _regression_problems(config)
    sync = config.synchronizer
    if config.restarts_after_refusal and not config.online and (sync.dynamic or sync.sync_offset or config.policies):
        yield error(
            "evaluation.after_refusal restart: each round has to explore with the version that it trains; leave out "
            "policies, and set synchronizer.sync_style fixed and sync_offset 0, or evaluation.after_refusal continue"
        )


def _regression_problems(config: RftConfig) -> Iterator[Finding]:
    regression = config.evaluation.regression
    if regression is None:
        return
    names = [taskset.known_as for taskset in config.buffer.explorer_input.eval_tasksets]
    if regression.taskset not in names[1:]:
        yield error(
            f"evaluation.regression.taskset {regression.taskset!r}: expected the name of one of "
            "buffer.explorer_input.eval_tasksets other than the first, on which evaluation.gate decides; these are "
            f"{', '.join(names[1:]) or 'none'}"
        )
    if not config.explorer.eval_on_startup:
        yield error("evaluation.regression compares with the start: set explorer.eval_on_startup to true")
    if regression.metric == "greedy_pass" and not config.evaluation.greedy:
        yield error("evaluation.regression.metric greedy_pass: set evaluation.greedy to true, so that it is measured")


def _sampling_problems(run: RunSettings) -> Iterator[Finding]:
    config, preset = run.config, run.algorithm
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
            yield error(
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


def _schedule_problems(run: RunSettings) -> Iterator[Finding]:
    config = run.config
    if config.evaluation.schedule is not None and not _is_cron(config.evaluation.schedule):
        yield error(
            f"evaluation.schedule {config.evaluation.schedule!r}: expected the five fields of cron (minute, hour, day, "
            "month, weekday), as in '0 3 * * *'"
        )
    endless = config.online and config.buffer.total_steps is None
    ends = (run.length() is not None and not endless) or config.trainer.total_steps is not None
    ends = ends or run.offline is not None  # the dataset determines the length of an offline training
    for key, optimizer in run.optimizers.items():
        needs_end = optimizer.lr_scheduler_type != "constant" and optimizer.total_steps is None
        if needs_end and not ends:
            yield error(
                f"{key}.lr_scheduler_type {optimizer.lr_scheduler_type} needs the end of the run: set "
                f"{key}.total_steps, trainer.total_steps or buffer.total_steps"
            )
        elif needs_end and not (run.batches.exact or run.batches.whole_round or run.offline is not None):
            yield warning(
                f"{key}.lr_scheduler_type {optimizer.lr_scheduler_type} reaches 0 after the optimiser steps of a run "
                "with one model call for each run of a task; workflows with several calls have more rows and steps, "
                f"and the later ones change nothing: set {key}.total_steps to the number of steps that you expect"
            )
        decays = optimizer.lr_scheduler_type != "constant"
        start = run.critic_only_steps if optimizer is config.algorithm.optimizer else 0
        if optimizer.total_steps is not None and start + optimizer.lr_warmup_steps + decays > optimizer.total_steps:
            after = f" (after the {start} steps of algorithm.critic.warmup_steps)" if start else ""
            yield error(
                f"{key}.lr_warmup_steps {optimizer.lr_warmup_steps}{after} does not end before {key}.total_steps "
                f"{optimizer.total_steps}: lower the first, or raise the second"
            )


def _online_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each setting that has no meaning for rounds of production traffic."""
    config = run.config
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
            yield error(f"{key}: rounds of production traffic take committed rows once, in style fixed; leave it out")
    if config.monitor.otlp_endpoint is not None:
        yield error("monitor.otlp_endpoint: `rft forget` cannot erase what a receiver has of a person; leave it out")
    service, replicas = config.service, config.explorer.rollout_model.engine_num
    if service.weight_update == "rolling" and service.least_in_service >= replicas:
        yield error(
            f"service.least_in_service {service.least_in_service}: a rolling update takes one of "
            f"{replicas} replicas out of service; lower it, or raise explorer.rollout_model.engine_num"
        )


def _adapter_problems(run: RunSettings) -> Iterator[Finding]:
    config = run.config
    if len(config.model.lora_configs) > 1:
        yield error(f"model.lora_configs has {len(config.model.lora_configs)} entries: a run trains one adapter")


_MOST_RUNS = 10_000_000  # runs of an explore batch: memory must hold their rows
_MOST_TOKENS = 10_000_000  # tokens of a sequence
_HIGHEST_RATE = 1.0  # AdamW changes a weight by about the learning rate in a step
_GATE_METRICS = ("sampled_pass", "greedy_pass", "mean_reward")


def _size_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each number that is too large to compute with."""
    config, buffer, model = run.config, run.config.buffer, run.config.model
    runs = run.batches.batch_size * run.batches.repeat_times
    if runs > _MOST_RUNS:
        yield error(
            f"buffer.batch_size {buffer.batch_size:,} means {runs:,} runs a batch: expected at most "
            f"{_MOST_RUNS:,}; lower it, or algorithm.repeat_times"
        )
    if model.max_model_len is not None and model.max_model_len > _MOST_TOKENS:
        yield error(
            f"model.max_model_len {model.max_model_len:,}: expected at most {_MOST_TOKENS:,} tokens; leave it out for "
            "the model's own limit"
        )
    rates = {f"{key}.lr": optimizer.lr for key, optimizer in run.optimizers.items()}
    if config.warm_start is not None:
        rates["warm_start.optimizer.lr"] = config.warm_start.optimizer.lr
    for key, rate in rates.items():
        if rate > _HIGHEST_RATE:
            yield error(f"{key} {rate:g}: expected at most {_HIGHEST_RATE:g}; 1e-6 is usual for large models")


def _gate_problems(run: RunSettings) -> Iterator[Finding]:
    """One line if no evaluation reports the gate's metric. Names with / or @ may come from a judge and are accepted."""
    metric = run.config.evaluation.gate.metric
    known = [*_GATE_METRICS, *(f"{name}_{end}" for name in _GATE_METRICS[:2] for end in ("low", "high"))]
    if metric not in known and not {"/", "@"} & set(metric):
        near = difflib.get_close_matches(metric, known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        yield error(f"evaluation.gate.metric {metric!r}: expected one of {', '.join(_GATE_METRICS)}{meant}")


_LONGEST = 100  # characters: folder names and MLflow allow 250 bytes, and a character may take four
_FORBIDDEN = "/\\:'\""


def _name_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each invalid name."""
    config = run.config
    names = {"project": config.project, "name": config.name}
    if config.registry.model_name is not None:
        names["registry.model_name"] = config.registry.model_name
    tasksets = config.buffer.explorer_input.every
    names |= {f"{key}.name": taskset.name for key, taskset in tasksets.items() if taskset.name is not None}
    for key, name in names.items():
        if (fault := _fault(name)) is not None:
            yield error(f"{key} {name!r}: {fault}; expected a name such as gsm8k-first")


def _fault(name: str) -> str | None:
    if not name.strip():
        return "is empty"
    if name != name.strip():
        return "begins or ends with a space"
    if name in (".", ".."):
        return "refers to another folder"
    if found := [character for character in _FORBIDDEN if character in name]:
        return f"has the character {found[0]!r}, which folder names or MLflow do not allow"
    if not name.isprintable():
        return "has characters that cannot be printed"
    return f"is longer than {_LONGEST} characters" if len(name) > _LONGEST else None


_QUERY_SECRET = re.compile(r"https?://[^\s?]+\?\S*(?:key|token|secret|password|sig)\S*=", re.IGNORECASE)
_INSTEAD = {
    "base_url": "put the key into an environment variable and name that in api_key_env, as in api_key_env: HELPER_KEY",
    "tracking_uri": "leave it out and set the environment variable MLFLOW_TRACKING_URI to it",
    "database": "leave out the password, and give it by the environment variable PGPASSWORD or the file ~/.pgpass",
}
_DATABASE = "buffer.trainer_input.experience_buffer.path"
_ELSEWHERE = "put it into an environment variable and read that in your code"


def _secret_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each setting that contains a secret, also within a URL. The line masks the secret."""
    config = run.config
    for key, value in flat_settings(config).items():
        if any(isinstance(text, str) and _is_secret(text) for text in (value if isinstance(value, list) else [value])):
            field = "database" if key == _DATABASE else re.split(r"[.\[]", key)[-1]
            yield error(
                f"{key} {redact(str(value))!r} contains a secret, and configurations are stored as plain text: "
                f"{_INSTEAD.get(field, _ELSEWHERE)}"
            )


def _is_secret(text: str) -> bool:
    return holds_secret(text) or _QUERY_SECRET.match(text) is not None


Check = Callable[[RunSettings], Iterator[Finding]]
CheckHere = Callable[[RunSettings, Machine], Iterator[Finding]]

#: The checks that need only the configuration, in the order of their findings.
CONFIGURATION: tuple[Check, ...] = (
    _name_problems,
    _size_problems,
    _gate_problems,
    _secret_problems,
    auxiliary_problems,
    in_flight_problems,
    _evaluation_problems,
    _input_problems,
    offline_problems,
    algorithm_problems,
    loss_problems,
    data_problems,
    batch_problems,
    _sampling_problems,
    _schedule_problems,
    policies_problems,
    _online_problems,
    _adapter_problems,
    without_effect,
)
#: The checks that also need this machine.
THIS_MACHINE: tuple[CheckHere, ...] = (local_problems, without_effect_here)


def settings_findings(run: RunSettings, machine: Machine) -> Iterator[Finding]:
    """What the checks of ``CONFIGURATION`` and ``THIS_MACHINE`` find."""
    for check in CONFIGURATION:
        yield from check(run)
    for check_here in THIS_MACHINE:
        yield from check_here(run, machine)
