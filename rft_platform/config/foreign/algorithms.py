"""Convert section ``algorithm`` of foreign files: names, arguments, warm-up, teachers and demonstrations."""

from collections.abc import Iterator, Mapping
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.config.foreign.names import (
    ADVANTAGE_ARGUMENTS,
    ADVANTAGE_NOTE,
    ADVANTAGES,
    ALGORITHMS,
    ENTROPY_CLIP_ARGUMENTS,
    ENTROPY_CLIPS,
    KL_COEF,
    LOSS_ARGUMENTS,
    LOSS_NOTE,
    LOSSES,
    OPERATORS,
    WITH_KL,
)
from rft_platform.config.foreign.treatments import Data, find, mapping_at, put, value_at

_STORE = "buffer.trainer_input.experience_buffer"
_REPLAY = f"{_STORE}.replay_buffer"
_MU = 0.1  # default of mu_peak and mu_valley
#: Keys below ``trainer.trainer_config.critic``, and their names below ``algorithm.critic``.
_CRITIC: Mapping[str, str] = {
    "optim.lr": "lr",
    "optim.weight_decay": "weight_decay",
    "optim.betas": "betas",
    "grad_clip": "clip_grad",
    "cliprange_value": "value_clip",
}
#: Keys of the policy below ``trainer.trainer_config``, and their names below ``algorithm.optimizer``.
_POLICY: Mapping[str, str] = {
    "actor_rollout_ref.actor.optim.lr": "lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "lr_warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "lr_warmup_steps_ratio",
    "actor_rollout_ref.actor.optim.warmup_style": "lr_scheduler_type",
    "actor_rollout_ref.actor.optim.betas": "betas",
    "actor_rollout_ref.actor.optim.weight_decay": "weight_decay",
    "actor_rollout_ref.actor.grad_clip": "clip_grad",
}
_SHARE = "algorithm.optimizer.lr_warmup_steps_ratio"
_AUXILIARY_BUFFERS = "buffer.trainer_input.auxiliary_buffers"


def convert_algorithm(data: Data) -> Iterator[str]:
    """Convert section ``algorithm`` and the keys of other sections that belong to the algorithm.

    Yields one line for each difference. Raises UserError.
    """
    section = data.setdefault("algorithm", {})
    if not isinstance(section, dict):
        return
    yield from _demonstrations(data, section)
    yield from _named(section)
    for name in ("kl_loss_fn", "kl_penalty_fn"):
        yield from _without_kl(section, name)
        yield from _adaptive_kl(section, name)
    yield from _entropy_clip(section)
    yield from _advantage(section)
    yield from _loss(section)
    share = policy_optimizer(data, section)
    yield from warm_up(data, section, share)
    yield from _teacher(data, section)
    yield from _operators(data)
    yield from _replay(data)
    _critic(data, section)
    if not section:
        del data["algorithm"]


def _critic(data: Data, section: Data) -> None:
    """Move the critic's settings from the sections of another framework's trainer, if the algorithm has a critic.

    A file that names no algorithm means ppo.
    """
    if section.get("algorithm_type") not in (None, "ppo"):
        return
    for foreign, own in _CRITIC.items():
        for found in find(data, f"trainer.trainer_config.critic.{foreign}"):
            put(section, f"critic.{own}", found.value(), f"{found.shown} and algorithm.critic.{own}")


def policy_optimizer(data: Data, section: Data) -> str:
    """Move the policy's settings from the sections of another framework's trainer to ``section``.

    Versions of the other system that know ``algorithm.optimizer`` read nothing else, so a file with that section keeps
    it as it is. Returns the key of the file that sets the warm-up as a share of all steps.
    """
    share, own = _SHARE, section.get("optimizer") or {}
    if not isinstance(own, dict) or own.keys() - {"clip_grad"}:  # this key may come from trainer.grad_clip
        return share
    clipped = bool(own) or value_at(data, "trainer.grad_clip") is not None
    for foreign, name in _POLICY.items():
        for found in find(data, f"trainer.trainer_config.{foreign}"):
            if found.section[found.name] is None or (name == "clip_grad" and clipped):
                continue
            put(section, f"optimizer.{name}", found.value(), f"{found.shown} and algorithm.optimizer.{name}")
            share = found.shown if name == "lr_warmup_steps_ratio" else share
    return share


def _named(section: Data) -> Iterator[str]:
    name = str(section.get("algorithm_type"))
    if name in ALGORITHMS:
        section["algorithm_type"], note = ALGORITHMS[name]
        yield f"algorithm.algorithm_type {name} is {section['algorithm_type']} here" + (f": {note}" if note else "")


def default_kl(data: Data) -> Iterator[str]:
    """One line if the other system would add a KL term that the file does not mention; here nothing adds it."""
    section = mapping_at(data, "algorithm")
    name = section.get("algorithm_type")
    unset = value_at(section, "kl_loss_fn_args.kl_coef") is None and section.get("kl_loss_fn") != "none"
    if unset and isinstance(name, str) and name in WITH_KL:
        yield (
            f"algorithm.kl_loss_fn_args.kl_coef is not set: {name} has no KL term here, and one of weight {KL_COEF} in "
            f"Trinity-RFT: set it to {KL_COEF} for the same loss, or kl_loss_fn to none"
        )


def _without_kl(section: Data, name: str) -> Iterator[str]:
    """Remove the function ``none`` of a KL term, and the term's coefficient.

    In a foreign file ``none`` disables the term; on this platform a coefficient of 0 does.
    """
    if section.get(name) != "none":
        return
    del section[name]
    arguments = mapping_at(section, f"{name}_args")
    for key in ("adaptive", "target_kl", "horizon"):
        arguments.pop(key, None)
    if arguments.pop("kl_coef", None):
        yield f"algorithm.{name} none: algorithm.{name}_args.kl_coef is left out, and there is no such KL term"


def _adaptive_kl(section: Data, name: str) -> Iterator[str]:
    """Convert the arguments by which a KL coefficient adapts: here a ``target`` of the penalty alone says so."""
    key, arguments = f"algorithm.{name}_args", mapping_at(section, f"{name}_args")
    if not {"adaptive", "target_kl"} & arguments.keys():
        return
    adaptive, target = arguments.pop("adaptive", False), arguments.pop("target_kl", None)
    horizon = arguments.pop("horizon", None)
    if not adaptive:
        return
    if name == "kl_loss_fn":
        yield f"{key}.adaptive has no effect here: the weight of a KL in the loss is constant; kl_penalty_fn adapts"
        return
    if target is None:
        raise UserError(f"{key}.adaptive: target_kl is not set: give the KL per token to adapt to, or leave it out")
    put(arguments, "target", target, f"{key}.target_kl and {key}.target")
    if horizon is not None:
        yield f"{key}.horizon {horizon} has no effect here: it counts experiences there, and tokens here; set it again"


def _arguments(section: Data, name: str, own: frozenset[str]) -> Data | None:
    """The arguments of a function of the platform; None: no arguments are set, or the function is the user's own."""
    key, function = f"{name}_args", section.get(name)
    if section.get(key) is None:
        section.pop(key, None)
    known = function is None or (isinstance(function, str) and function in own)
    arguments = section.get(key)
    return arguments if known and isinstance(arguments, dict) else None


def _entropy_clip(section: Data) -> Iterator[str]:
    """Replace an advantage that leaves out tokens by the advantage ``grpo`` and the loss that leaves them out here."""
    name = section.get("advantage_fn")
    loss = ENTROPY_CLIPS.get(name) if isinstance(name, str) else None
    if loss is None:
        return
    if section.get("policy_loss_fn") not in (None, "ppo", loss):
        raise UserError(
            f"algorithm.advantage_fn {name} with policy_loss_fn {section['policy_loss_fn']}: the loss {loss} is the "
            "ppo loss without the tokens that the advantage leaves out: remove policy_loss_fn"
        )
    section["advantage_fn"], section["policy_loss_fn"] = "grpo", loss
    arguments = mapping_at(section, "advantage_fn_args")
    for argument, target in ENTROPY_CLIP_ARGUMENTS.items():
        if argument in arguments:
            both = f"algorithm.advantage_fn_args.{argument} and algorithm.policy_loss_fn_args.{target}"
            put(section, f"policy_loss_fn_args.{target}", arguments.pop(argument), both)
    yield f"algorithm.advantage_fn {name} is policy_loss_fn {loss} with advantage_fn grpo here"


def _advantage(section: Data) -> Iterator[str]:
    arguments = _arguments(section, "advantage_fn", ADVANTAGES)
    if arguments is None:
        return
    if section.get("algorithm_type") == "gkd":  # here its options belong to the loss
        share = arguments.pop("lambda_coef", None)
        arguments.pop("kl_coef", None)
        if share is not None:
            put(section, "policy_loss_fn_args.beta", share, "algorithm.advantage_fn_args.lambda_coef and beta")
    threshold = arguments.get("std_threshold")
    steps = section.get("advantage_fn") == "step_wise_grpo" or section.get("algorithm_type") == "multi_step_grpo"
    if threshold is not None and not steps:
        del arguments["std_threshold"]
        put(
            section,
            "filters.zero_variance",
            True,
            "algorithm.advantage_fn_args.std_threshold and filters.zero_variance",
        )
        yield (
            "algorithm.advantage_fn_args.std_threshold: replaced by algorithm.filters.zero_variance, which leaves "
            "out groups whose rewards are all equal"
        )
    if arguments.get("std_cal_level") in ("group", None):  # the default
        arguments.pop("std_cal_level", None)
    kept, dropped = _renamed(arguments, ADVANTAGE_ARGUMENTS)
    if kept:
        section["advantage_fn_args"] = kept
    else:
        del section["advantage_fn_args"]
    if dropped:
        yield f"algorithm.advantage_fn_args {', '.join(dropped)}: no effect here: {ADVANTAGE_NOTE}"


def _loss(section: Data) -> Iterator[str]:
    arguments = _arguments(section, "policy_loss_fn", LOSSES)
    if arguments is None:
        return
    if section.get("algorithm_type") == "asymre" and "tau" in arguments:
        tau = arguments.pop("tau")
        if tau:
            yield f"algorithm.policy_loss_fn_args.tau {tau}: no effect here: it only scales the loss of asymre"
    both = arguments.pop("clip_range", None)
    mode = arguments.pop("loss_agg_mode", None)
    if mode is not None:
        put(section, "loss_agg_mode", mode, "algorithm.policy_loss_fn_args.loss_agg_mode and algorithm.loss_agg_mode")
    kept, dropped = _renamed(arguments, LOSS_ARGUMENTS)
    if both is not None:
        kept = {"clip_low": both, "clip_high": both, **kept}
    if kept:
        section["policy_loss_fn_args"] = kept
    else:
        del section["policy_loss_fn_args"]
    if dropped:
        yield f"algorithm.policy_loss_fn_args {', '.join(dropped)}: no effect here: {LOSS_NOTE}"


def _renamed(arguments: Data, names: Mapping[str, str | None]) -> tuple[Data, list[str]]:
    kept: Data = {}
    dropped = []
    for name, value in arguments.items():
        target = names.get(name, name)
        if target is None:
            dropped.append(name)
        else:
            kept[target] = value
    return kept, dropped


def warm_up(data: Data, section: Data, key: str = _SHARE) -> Iterator[str]:
    """Replace the warm-up as a share of all steps by a number of steps; yields one line that states both.

    ``key``: the share's key in the file. Raises UserError if the number of all steps is not known:
    ``buffer.total_steps`` counts explore batches, except in a training on a dataset.
    """
    optimizer = section.get("optimizer")
    if not isinstance(optimizer, dict):
        return
    if optimizer.get("lr_warmup_steps") == -1:
        del optimizer["lr_warmup_steps"]
    share = optimizer.pop("lr_warmup_steps_ratio", None)
    if not share:
        return
    if not _is_share(share):
        raise UserError(f"{key} {share!r}: expected a number from 0 to 1")
    steps = value_at(data, "trainer.total_steps")
    if not steps and data.get("mode") == "train" and value_at(data, f"{_STORE}.storage_type") == "file":
        steps = value_at(data, "buffer.total_steps")
    if not isinstance(steps, int):
        raise UserError(
            f"{key} {share}: the number of steps is not set; set "
            "trainer.total_steps, or algorithm.optimizer.lr_warmup_steps"
        )
    both = f"{key} and lr_warmup_steps"
    put(optimizer, "lr_warmup_steps", int(share * steps), both)
    yield f"{key} {share} of {steps} steps is lr_warmup_steps {int(share * steps)}"


def _teacher(data: Data, section: Data) -> Iterator[str]:
    """Make the first auxiliary model the teacher if the file configures a distillation."""
    if section.get("algorithm_type") not in ("on_policy_distill", "gkd") or section.get("teacher_model_path"):
        return
    models: Any = value_at(data, "explorer.auxiliary_models")
    if isinstance(models, list) and models and isinstance(models[0], dict) and models[0].get("model_path"):
        teacher = models.pop(0)["model_path"]
        section["teacher_model_path"] = teacher
        yield f"explorer.auxiliary_models[0] is the teacher: algorithm.teacher_model_path {teacher}"


def _demonstrations(data: Data, section: Data) -> Iterator[str]:
    """Convert the auxiliary buffer with demonstrations to ``algorithm.experts``."""
    strategy = _popped(section, "sample_strategy_args") or {}
    mixes = str(section.get("algorithm_type")).startswith("mix")
    loss = (_arguments(section, "policy_loss_fn", LOSSES) or {}) if mixes else {}
    size = loss.pop("train_batch_size_expert", None)
    share, weight = strategy.pop("expert_data_ratio", None), loss.pop("mu", None)
    chord = section.get("algorithm_type") == "mix_chord"
    schedule = _share_schedule(loss, chord)
    if chord and loss.get("enable_phi_function") is None:
        put(section, "policy_loss_fn_args.enable_phi_function", True, "the default of mix_chord")
    if strategy:
        names = ", ".join(map(str, strategy))
        yield f"algorithm.sample_strategy_args {names}: no effect here: synchronizer and replay_buffer decide"
    buffers = _popped(mapping_at(data, "buffer.trainer_input"), "auxiliary_buffers")
    if not buffers:
        return
    if len(buffers) > 1 or not mixes:
        raise UserError(
            f"{_AUXILIARY_BUFFERS}: the algorithm mix learns from one dataset of demonstrations (algorithm.experts), "
            "and no other algorithm reads further buffers: leave them out"
        )
    (buffer,) = buffers.values()
    if not isinstance(buffer, dict):
        raise UserError(f"{_AUXILIARY_BUFFERS}: got {buffer!r}; expected a section with path")
    form = mapping_at(buffer, "format")
    experts: Data = {key: buffer[key] for key in ("path", "split", "subset_name") if buffer.get(key) is not None}
    columns = {key: form[key] for key in ("prompt_key", "response_key", "system_prompt") if form.get(key) is not None}
    if columns:
        experts["format"] = columns
    if weight is not None:
        experts["weight"] = weight
    experts |= schedule
    total = value_at(data, "buffer.train_batch_size")
    rows = size or (_is_share(share) and isinstance(total, int) and round(share * total))
    if rows:
        experts["batch_size"] = rows
        if (
            isinstance(total, int) and isinstance(rows, int) and total > rows
        ):  # here a step has demonstrations in addition to its experiences
            data["buffer"]["train_batch_size"] = total - rows
            yield f"buffer.train_batch_size {total}: {total - rows} experiences and {rows} demonstrations a step"
    put(section, "experts", experts, f"{_AUXILIARY_BUFFERS} and algorithm.experts")


def _share_schedule(loss: Data, chord: bool) -> Data:
    """Keys of ``algorithm.experts`` for the arguments ``mu_*`` of the loss of ``mix_chord``, which are removed."""
    given = {name: loss.pop(f"mu_{name}", None) for name in ("warmup_steps", "decay_steps", "peak", "valley")}
    if not chord and all(value is None for value in given.values()):
        return {}
    peak, valley = (_MU if given[name] is None else given[name] for name in ("peak", "valley"))
    steps: Data = {name: given[name] for name in ("warmup_steps", "decay_steps") if given[name]}
    return {**steps, "weight": peak, "final_weight": valley} if steps else {"weight": valley}


def _popped(section: Data, key: str) -> Data | None:
    """Remove and return a mapping. A value of another type stays in the section, so that the validation refuses it."""
    if section.get(key) is None or isinstance(section[key], dict):
        return section.pop(key, None)
    return None


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _operators(data: Data) -> Iterator[str]:
    pipeline = value_at(data, "data_processor.experience_pipeline")
    operators = pipeline.get("operators") if isinstance(pipeline, dict) else None
    if not isinstance(operators, list):
        return
    kept = []
    for entry in operators:
        name = str(entry.get("name")) if isinstance(entry, dict) else ""
        if name in OPERATORS:
            yield f"data_processor.experience_pipeline.operators {name} has no effect here: {OPERATORS[name]}"
        else:
            kept.append(entry)
    pipeline["operators"] = kept


def _replay(data: Data) -> Iterator[str]:
    replay = value_at(data, _REPLAY)
    if isinstance(replay, dict) and replay.get("priority_fn") == "decay_limit_randomization":
        del replay["priority_fn"]
        yield f"{_REPLAY}.priority_fn decay_limit_randomization: linear_decay takes its place"
