"""Convert tasksets of foreign files: apply default workflows and rewards, and replace the names of both."""

from collections.abc import Iterator
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.config.foreign.names import (
    REFUSED_REWARDS,
    REFUSED_WORKFLOWS,
    REWARDS,
    SELECTOR_ARGUMENTS,
    SELECTOR_NOTE,
    WORKFLOWS,
    Judge,
    KnownWorkflow,
)
from rft_platform.config.foreign.treatments import Data, mapping_at, put, value_at

_INPUT = "buffer.explorer_input"
_WORKFLOW_KEYS = ("workflow", "default_workflow_type", "workflow_type")
_REWARD_KEYS = ("judge", "default_reward_fn_type", "reward_fn_type")


def convert_tasksets(data: Data, own_functions: bool) -> Iterator[str]:
    """Convert every taskset of the file; yields one line for each difference. Raises UserError.

    ``own_functions``: the caller replaces the workflow, so the file's workflow, and the judge and system prompt that
    follow from this workflow, are ignored.
    """
    inputs = value_at(data, _INPUT)
    if not isinstance(inputs, dict):
        return
    workflow, reward = inputs.pop("default_workflow_type", None), inputs.pop("default_reward_fn_type", None)
    held_out = inputs.pop("default_eval_workflow_type", None) or workflow
    for shown, taskset, default in _tasksets(inputs, workflow, held_out):
        _fill(taskset, _WORKFLOW_KEYS, default)
        _fill(taskset, _REWARD_KEYS, reward)
        yield from _repetitions(shown, taskset)
        yield from _selector(shown, taskset)
        if own_functions:
            taskset.pop("workflow", None)
        yield from _names(data, shown, taskset)


def _tasksets(inputs: Data, workflow: str | None, held_out: str | None) -> Iterator[tuple[str, Data, str | None]]:
    if isinstance(inputs.get("taskset"), dict):
        yield f"{_INPUT}.taskset", inputs["taskset"], workflow
    for key, default in (("tasksets", workflow), ("eval_tasksets", held_out)):
        entries = inputs.get(key)
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, dict):
                yield f"{_INPUT}.{key}[{index}]", entry, default


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
        yield from _workflow(data, shown, taskset, known)
    elif isinstance(name, str) and ":" not in name and "." in name and "/" not in name and not name.endswith(".py"):
        module, _, attribute = name.rpartition(".")
        taskset["workflow"] = f"{module}:{attribute}"


def _workflow(data: Data, shown: str, taskset: Data, known: KnownWorkflow) -> Iterator[str]:
    foreign = taskset["workflow"]
    taskset["workflow"] = known.workflow
    if not isinstance(taskset.get("workflow_args"), dict | None):
        return  # the validation refuses it
    arguments = dict(taskset.pop("workflow_args", None) or {})
    thinks = bool(arguments.get("with_think"))
    prompt = (known.thinking_prompt if thinks else None) or known.system_prompt
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
    if taskset.get("judge") is None and known.judge is not None:
        taskset["judge"] = known.judge
        yield from _model_judge(data, shown, taskset, known.judge)
    if prompt is not None and value_at(taskset, "format.system_prompt") is None:
        put(taskset, "format.system_prompt", prompt, shown)
    if known.reads_rows:
        form = taskset.setdefault("format", {})
        if isinstance(form, dict):
            form.setdefault("prompt_key", None)
            form.setdefault("response_key", None)
    if known.note is not None:
        yield f"{shown}.workflow {foreign}: {known.note}"


def _model_judge(data: Data, shown: str, taskset: Data, judge: Judge) -> Iterator[str]:
    """Let a judge that asks a model use the first auxiliary model, unless the file names another model."""
    if judge not in ("pairwise", "llm"):
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
