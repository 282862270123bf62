"""Convert the content of another system's configuration file: its keys by the table ``KEYS``, and its names.

- Tasksets get the default workflows and rewards of the other system, and the names of both are replaced.
- Section ``stages``, a supervised fine-tuning and the training after it, becomes one project: the fine-tuning becomes
  section ``warm_start`` (round 0), and the sections of the other stage replace those of the file.
"""

from collections.abc import Generator, Iterator
from copy import deepcopy
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.config.foreign.algorithms import convert_algorithm, default_kl, policy_optimizer, warm_up
from rft_platform.config.foreign.keys import KEYS
from rft_platform.config.foreign.names import (
    FORM,
    FORM_NOTE,
    REFUSED_REWARDS,
    REFUSED_WORKFLOWS,
    REWARDS,
    SELECTOR_ARGUMENTS,
    SELECTOR_NOTE,
    WORKFLOWS,
    Judge,
    KnownWorkflow,
)
from rft_platform.config.foreign.treatments import Data, apply, mapping_at, put, value_at

INPUT = "buffer.explorer_input"
_WORKFLOW_KEYS = ("workflow", "default_workflow_type", "workflow_type")
_REWARD_KEYS = ("judge", "default_reward_fn_type", "reward_fn_type")


def convert_tasksets(data: Data, own_functions: bool) -> Iterator[str]:
    """Convert every taskset of the file; yields one line for each difference. Raises UserError.

    ``own_functions``: the caller replaces the workflow, so the file's workflow, and the judge and system prompt that
    follow from this workflow, are ignored.
    """
    inputs = value_at(data, INPUT)
    if not isinstance(inputs, dict):
        return
    workflow, reward = inputs.pop("default_workflow_type", None), inputs.pop("default_reward_fn_type", None)
    held_out = inputs.pop("default_eval_workflow_type", None) or workflow
    for shown, taskset, default in tasksets(inputs, workflow, held_out):
        _fill(taskset, _WORKFLOW_KEYS, default)
        _fill(taskset, _REWARD_KEYS, reward)
        yield from _repetitions(shown, taskset)
        yield from _selector(shown, taskset)
        if own_functions:
            taskset.pop("workflow", None)
        yield from _names(data, shown, taskset)


def tasksets(inputs: Data, workflow: str | None, held_out: str | None) -> Iterator[tuple[str, Data, str | None]]:
    """The key, the content and the default workflow of each taskset."""
    if isinstance(inputs.get("taskset"), dict):
        yield f"{INPUT}.taskset", inputs["taskset"], workflow
    for key, default in (("tasksets", workflow), ("eval_tasksets", held_out)):
        entries = inputs.get(key)
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, dict):
                yield f"{INPUT}.{key}[{index}]", entry, default


def _fill(taskset: Data, keys: tuple[str, ...], value: str | None) -> None:
    """Set the first of ``keys`` to the value that the taskset has under any of ``keys``, or else to ``value``."""
    set_here = [taskset.pop(key) for key in keys if key in taskset]
    chosen = next((entry for entry in set_here if entry is not None), value)
    if chosen is not None or set_here:
        taskset[keys[0]] = chosen


def _repetitions(shown: str, taskset: Data) -> Iterator[str]:
    times = taskset.pop("repeat_times", None)
    if times is None:
        return
    if "eval_tasksets" in shown:
        put(taskset, "rollout_args.n", times, f"{shown}.repeat_times and {shown}.rollout_args.n")
    else:
        yield f"{shown}.repeat_times has no effect here: algorithm.repeat_times is the number of runs per task"


def _selector(shown: str, taskset: Data) -> Iterator[str]:
    selector = taskset.get("task_selector")
    if not isinstance(selector, dict) or selector.get("selector_type") != "difficulty_based":
        return
    given = selector.pop("kwargs", None) or selector.pop("args", None) or {}
    if not isinstance(given, dict):
        selector["args"] = given
        return
    unknown = [name for name in ("m", "lamb", "rho", "tau", "do_sample") if name in given]
    selector["args"] = {SELECTOR_ARGUMENTS.get(name, name): given[name] for name in given if name not in unknown}
    if isinstance(selector.get("feature_keys"), list) and len(selector["feature_keys"]) > 1:
        selector["feature_keys"] = selector["feature_keys"][:1]
    if unknown:
        yield f"{shown}.task_selector: {', '.join(unknown)} have no effect here: {SELECTOR_NOTE}"


def _names(data: Data, shown: str, taskset: Data) -> Iterator[str]:
    """Replace foreign names of the workflow and of the reward."""
    name, reward = taskset.get("workflow"), taskset.get("judge")
    if isinstance(name, str) and name in REFUSED_WORKFLOWS:
        raise UserError(f"{shown}.workflow {name}: {REFUSED_WORKFLOWS[name]}")
    known = WORKFLOWS.get(name) if isinstance(name, str) else None
    if isinstance(reward, str) and (reward in REWARDS or reward in REFUSED_REWARDS):
        taskset["judge"] = _judge_of(data, shown, taskset, reward)
    if known is not None:
        yield from _workflow(data, shown, taskset, known, reward)
    elif isinstance(name, str) and ":" not in name and "." in name and "/" not in name and not name.endswith(".py"):
        module, _, attribute = name.rpartition(".")
        taskset["workflow"] = f"{module}:{attribute}"
    judge = taskset.get("judge")
    if isinstance(judge, list) and any(part is FORM for part in judge):
        yield f"{shown}.judge: {FORM_NOTE}"


def _workflow(data: Data, shown: str, taskset: Data, known: KnownWorkflow, reward: Any) -> Iterator[str]:
    """Replace the workflow; ``reward``: the name of the reward in the file."""
    foreign = taskset["workflow"]
    taskset["workflow"] = known.workflow
    if not isinstance(taskset.get("workflow_args"), dict | None):
        return  # the validation refuses it
    arguments = dict(taskset.pop("workflow_args", None) or {})
    thinks = bool(arguments.get("with_think"))
    prompt = (known.thinking_prompt if thinks else None) or known.system_prompt
    if thinks and known.thinking_prompt is not None and reward in (None, "math_boxed_reward"):
        yield _thoughts(shown, taskset, arguments.pop("format_score_coef", None) or 0.1)
    kept, dropped = {}, []
    for name, value in arguments.items():
        target = known.arguments.get(name, name if known.workflow != "single_turn" else None)
        if target is not None:
            kept[target] = value
        elif name != "with_think" and value:
            dropped.append(str(name))
    if kept:
        taskset["workflow_args"] = kept
    if dropped:
        yield f"{shown}.workflow_args {', '.join(dropped)}: no effect on workflow {known.workflow}"
    judge = (known.eval_judge if "eval_tasksets" in shown else None) or known.judge
    if taskset.get("judge") is None and judge is not None:
        taskset["judge"] = judge
        yield from _model_judge(data, shown, taskset, judge)
    if prompt is not None and value_at(taskset, "format.system_prompt") is None:
        put(taskset, "format.system_prompt", prompt, shown)
    if known.reads_rows:
        form = taskset.setdefault("format", {})
        if isinstance(form, dict):
            form.setdefault("prompt_key", None)
            form.setdefault("response_key", None)
    if known.note is not None:
        yield f"{shown}.workflow {foreign}: {known.note}"


def _thoughts(shown: str, taskset: Data, weight: Any) -> str:
    """Reward thoughts between tags beside a right answer; returns a line about the difference."""
    thoughts = {"judge": "tags", "weight": weight, "args": {"tags": ["think"], "alone": False}}
    taskset["judge"] = [{"judge": "math", "weight": 1.0}, thoughts]
    return (
        f"{shown}.workflow_args with_think and format_score_coef: thoughts between <think> and </think> add {weight} "
        f"or 0, and 0 or -{weight} in Trinity-RFT: rewards are {weight} higher than there"
    )


def _model_judge(data: Data, shown: str, taskset: Data, judge: Judge) -> Iterator[str]:
    """Let a judge that asks a model use the first auxiliary model, unless the file names another model."""
    if judge not in ("ranking", "llm"):
        return
    models = value_at(data, "explorer.auxiliary_models")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise UserError(f"{shown}.judge {judge} asks a model, and explorer.auxiliary_models is empty: add one")
    name = models[0].setdefault("name", "judge")
    if taskset.get("judge_args") is None:
        taskset["judge_args"] = {}
    arguments: Any = taskset["judge_args"]
    if not isinstance(arguments, dict):
        return  # the validation refuses it
    arguments.setdefault("model", name)
    if "criteria" not in arguments:
        reference = value_at(taskset, "format.response_key")
        arguments["criteria"] = {"correctness": "the answer is correct and complete"}
        if reference is not None:
            arguments.setdefault("reference_key", reference)
        yield f"{shown}.judge_args.criteria is not set: answers are judged by correctness"


def _judge_of(data: Data, shown: str, taskset: Data, reward: str) -> Judge:
    arguments = mapping_at(taskset, "reward_fn_args")
    if reward in REFUSED_REWARDS:
        named = str(arguments.get("reward_name"))
        if named not in REWARDS:
            raise UserError(f"{shown}.judge {reward}: {REFUSED_REWARDS[reward]}")
        taskset.pop("reward_fn_args", None)
        return REWARDS[named]
    if reward == "math_dapo_reward" and arguments.get("enable_overlong_penalty") and "eval_" not in shown:
        penalty = {
            "weight": arguments.get("penalty_factor", 1.0),
            "max_length": arguments.get("max_response_length"),
            "cache_length": arguments.get("cache_length"),
        }
        limit = value_at(data, "model.max_response_tokens")
        if isinstance(limit, int) and isinstance(penalty["max_length"], int) and penalty["max_length"] > limit:
            penalty["max_length"] = limit
        put(data, "algorithm.filters.overlong", penalty, f"{shown}.reward_fn_args and algorithm.filters.overlong")
    taskset.pop("reward_fn_args", None)
    return REWARDS[reward]


_SECTIONS = ("mode", "algorithm", "buffer", "data_processor", "explorer", "trainer")
_MORE = "run each further one as its own project, with model_path: models:/NAME@champion of the one before"
_STORE = "buffer.trainer_input.experience_buffer"
_OPTIMIZER = "algorithm.optimizer"
_COLUMNS = {"messages_key": "messages", "tools_key": "tools"}  # the columns that a warm start reads
_USED = (
    "stage_name",
    "mode",
    "algorithm.algorithm_type",
    *(f"buffer.{key}" for key in ("train_batch_size", "total_epochs", "total_steps")),
    *(f"trainer.{key}" for key in ("total_steps", "grad_clip")),
    *(f"{_STORE}.{key}" for key in ("name", "storage_type", "path", "split", "subset_name")),
    *(f"{_STORE}.format.{key}" for key in ("prompt_type", "prompt_key", "response_key", "system_prompt", *_COLUMNS)),
)


def convert_stages(data: Data) -> Iterator[str]:
    """Merge the stages into the file; yields one line for each difference.

    Raises UserError unless the stages are one training, or a supervised fine-tuning followed by one training.
    """
    stages = data.pop("stages", None)
    if not stages:
        return
    _check(stages)
    *first, last = stages
    if len(first) > 1 or (first and _algorithm(first[0]) != "sft"):
        raise UserError(f"stages: a project has an optional stage of sft and one stage after it; {_MORE}")
    if first:
        if _algorithm(last) == "sft":
            raise UserError(f"stages: both are sft; {_MORE}")
        if data.get("warm_start") is not None:
            raise UserError("stages: the stage of sft and section warm_start are the same training: leave one out")
        names = [str(stage.get("stage_name", number)) for number, stage in enumerate(stages)]
        yield f"stages: {names[0]} is the warm start (round 0) of the project, and {names[1]} its rounds"
        data["warm_start"] = yield from _warm_start(first[0], data)
    for name in _SECTIONS:
        if last.get(name) is not None:
            data[name] = last[name]


def _check(stages: Any) -> None:
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise UserError("stages: expected a list of stages, each with stage_name and sections")
    unknown = sorted({str(key) for stage in stages for key in stage} - {"stage_name", *_SECTIONS})
    if unknown:
        raise UserError(f"stages: unknown key {unknown[0]}; a stage has stage_name, {', '.join(_SECTIONS)}")
    for number, stage in enumerate(stages):
        for name in set(_SECTIONS) - {"mode"}:
            if not isinstance(stage.get(name), dict | None):
                raise UserError(f"stages[{number}].{name}: got {stage[name]!r}; expected a section with indented keys")


def _algorithm(stage: Data) -> Any:
    return value_at(stage, "algorithm.algorithm_type")


def _warm_start(stage: Data, data: Data) -> Generator[str, None, Data]:
    """Section ``warm_start`` with the settings of a stage of sft.

    If the stage has no section ``buffer`` or ``trainer``, that section of the file is used.
    """
    own = {name: section for name, section in stage.items() if section is not None}
    stage = {name: deepcopy(data.get(name)) for name in ("buffer", "trainer")} | own
    share = policy_optimizer(stage, stage["algorithm"])
    for key in _leaves(own):
        if key not in _USED and not key.startswith(f"{_OPTIMIZER}."):
            yield f"stages[0].{key} has no effect here: section warm_start has the settings of the warm start"
    buffer, form = mapping_at(stage, _STORE), mapping_at(stage, f"{_STORE}.format")
    for key, column in _COLUMNS.items():
        if form.get(key) not in (None, column):
            raise UserError(f"stages[0].{_STORE}.format.{key} {form[key]}: rename the column to {column}")
    section: Data = {key: buffer[key] for key in ("path", "split", "subset_name") if buffer.get(key) is not None}
    columns = {key: form[key] for key in ("prompt_key", "response_key", "system_prompt") if form.get(key) is not None}
    if columns:
        section["format"] = columns
    if (size := value_at(stage, "buffer.train_batch_size")) is not None:
        section["batch_size"] = size
    steps = value_at(stage, "trainer.total_steps") or value_at(stage, "buffer.total_steps")
    if steps is not None:
        section["steps"] = steps
    else:
        section["epochs"] = value_at(stage, "buffer.total_epochs") or 1
    yield from _optimizer(stage, section, steps, share)
    return section


def _optimizer(stage: Data, section: Data, steps: Any, share: str) -> Iterator[str]:
    """Convert the stage's ``algorithm.optimizer`` as that of a whole file is converted; store it in ``section``.

    ``share``: the key that sets the warm-up as a share of all steps.
    """
    alone: Data = {"algorithm": {"optimizer": value_at(stage, _OPTIMIZER)}, "trainer": {"total_steps": steps}}
    lines: list[str] = []
    try:
        for key, treatment in KEYS:
            if key.startswith(f"{_OPTIMIZER}."):
                lines += apply(alone, key, treatment)
        lines += warm_up(alone, alone["algorithm"], share)
        if (clip := value_at(stage, "trainer.grad_clip")) is not None:
            put(alone, f"{_OPTIMIZER}.clip_grad", clip, f"trainer.grad_clip and {_OPTIMIZER}.clip_grad")
    except UserError as error:
        raise UserError(f"stages[0].{error}") from None
    yield from (f"stages[0].{line}" for line in lines)
    if (optimizer := value_at(alone, _OPTIMIZER)) is not None:
        section["optimizer"] = optimizer


def _leaves(section: Data, prefix: str = "") -> Iterator[str]:
    """The dotted keys of all values that are not null."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}"


_OF_VERL = "actor_rollout_ref"
_TINKER_RANK = 16  # the service's default rank of an adapter


def convert(data: Data, source: str, *, own_functions: bool = False) -> tuple[Data, tuple[str, ...]]:
    """A copy of ``data`` with the keys and names of this platform, and one line for each difference.

    ``own_functions``: the caller replaces the workflows that the file names.
    Raises UserError for a key that the platform cannot support; the message begins with ``source``.
    """
    if _OF_VERL in data:
        raise UserError(
            f"{source}: {_OF_VERL} is a section of verl, whose files are not converted: write a new file "
            "(docs/guide.md), with the model, the batch sizes and the learning rate of this one"
        )
    converted = deepcopy(data)
    notices: list[str] = []
    try:
        notices += convert_stages(converted)
        _on_ray(converted)
        _think_alike(converted)
        for key, treatment in KEYS:
            notices += apply(converted, key, treatment)
        notices += _convert_tinker(converted)
        notices += convert_tasksets(converted, own_functions)
        unsaid = list(default_kl(converted))
        notices += convert_algorithm(converted)
        if sign_of_other_system(data, converted):
            notices += unsaid
        notices += _other_trainer(converted)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return converted, tuple(dict.fromkeys(notices))


_NO_SIGN = "model.lora_configs[0].name"  # has no effect here, and a file of this platform may name its adapter


def sign_of_other_system(given: Any, converted: Any, key: str = "") -> str | None:
    """The first key of a file that its conversion removed or replaced, a replaced one with its value.

    None for a file of this platform. Keys without a value do not count.
    """
    if given is converted or given == converted or key == _NO_SIGN or given in (None, {}, []):
        return None
    if parts := _parts(given, key):
        others = _parts(converted, key)
        return next(filter(None, (sign_of_other_system(parts[name], others.get(name), name) for name in parts)), None)
    return key if converted is None else f"{key} {given}"


def _parts(node: Any, key: str) -> Data:
    """The entries of a section or list by their whole keys; none of another value."""
    if isinstance(node, list):
        return {f"{key}[{index}]": entry for index, entry in enumerate(node)}
    entries = node.items() if isinstance(node, dict) else ()
    return {f"{key}.{name}" if key else str(name): entry for name, entry in entries}


def _on_ray(data: Data) -> None:
    """A file that names the address of a Ray cluster runs on it."""
    section = data.get("cluster")
    if isinstance(section, dict) and section.get("ray_address") not in (None, "", "auto"):
        section.setdefault("kind", "ray")


def _think_alike(data: Data) -> None:
    """Set ``model.enable_thinking`` for the auxiliary models, too, unless they have their own."""
    thinks, models = value_at(data, "model.enable_thinking"), value_at(data, "explorer.auxiliary_models")
    for model in models if thinks is not None and isinstance(models, list) else ():
        if isinstance(model, dict) and model.get("enable_thinking") is None:
            model["enable_thinking"] = thinks


def _other_trainer(data: Data) -> Iterator[str]:
    """Remove the settings of another framework's trainer; yields one line for each section that has some."""
    settings = data["trainer"].pop("trainer_config", None) if isinstance(data.get("trainer"), dict) else None
    for name, section in settings.items() if isinstance(settings, dict) else ():
        if keys := list(_leaves(section)) if isinstance(section, dict) else [name]:
            yield (
                f"trainer.trainer_config.{name} has no effect here, since it configures another framework's trainer: "
                + ", ".join(keys)
            )


def _convert_tinker(data: Data) -> Iterator[str]:
    """Replace a training on a paid service by an adapter of the same rank that is trained here.

    Yields one line for each setting without effect. Raises UserError if the file gives the service's address.
    """
    model = data.get("model")
    settings = model.pop("tinker", None) if isinstance(model, dict) else None
    if not isinstance(settings, dict) or not settings.get("enable"):
        return
    if settings.get("base_url"):
        raise UserError(f"model.tinker.base_url {settings['base_url']}: Tinker is a paid service; remove model.tinker")
    if not value_at(data, "model.lora_configs"):
        data["model"]["lora_configs"] = [{"lora_rank": settings.get("rank") or _TINKER_RANK}]
    serving = value_at(data, "explorer.rollout_model")
    if isinstance(serving, dict) and serving.pop("engine_num", None) not in (None, 1):
        yield "explorer.rollout_model.engine_num has no effect here: model.tinker counts connections by it"
    yield "model.tinker has no effect here: Tinker is a paid service; a LoRA adapter is trained on this machine instead"
