"""Check the algorithm: refuse keys that would have no effect, and parts that do not fit together."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rft_platform.algorithms.presets import Preset
from rft_platform.common.errors import UserError
from rft_platform.config.findings import Finding, error
from rft_platform.config.paths import is_missing
from rft_platform.config.resolve import OfflineKind, RunSettings
from rft_platform.config.schema.algorithm import Algorithm, Critic, ExperienceFilters, KlPenaltyArgs, RolloutCorrection
from rft_platform.config.schema.rft_config import RftConfig

if TYPE_CHECKING:
    from rft_platform.algorithms.losses.registry import PolicyLoss


def algorithm_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each key that is missing or that the algorithm does not read."""
    settings, preset = run.config.algorithm, run.algorithm
    yield from _model_problems(run)
    yield from _replaced_options(settings, preset)
    yield from _adaptation_problems(settings.kl_penalty_fn_args)
    yield from _penalty_problems(settings, preset)
    yield from _epoch_problems(run)
    yield from _filter_problems(run)


def _model_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each of demonstrations, teacher and critic that is missing or not used."""
    config, preset, settings = run.config, run.algorithm, run.config.algorithm
    name = settings.algorithm_type
    if preset.experts and settings.experts is None:
        yield error(f"algorithm.experts is not set: {name} also learns from demonstrations; give their path")
    elif preset.experts and settings.experts is not None and settings.experts.path is None and not config.online:
        yield error(f"algorithm.experts.path is not set: {name} also learns from demonstrations; give their path")
    if settings.experts is not None and not preset.experts:
        yield error(f"algorithm.experts: {name} uses no demonstrations; leave it out, or set algorithm_type: mix")
    if settings.teacher_model_path is not None and not preset.teacher:
        yield error(f"algorithm.teacher_model_path: {name} has no teacher; leave it out, or set algorithm_type: gkd")
    distils = config.mode != "train" or run.offline == "distill"
    if preset.teacher and settings.teacher_model_path is None and distils:
        yield error(
            f"algorithm.teacher_model_path is not set: {name} learns from a teacher; give its "
            "folder or Hugging Face name"
        )
    if not preset.critic and _names_critic(settings):
        yield error(f"algorithm.critic: {name} has no critic; leave it out, or set algorithm_type: ppo")
    if not preset.critic and config.model.critic_model_path is not None:
        yield error(f"model.critic_model_path: {name} has no critic; leave it out, or set algorithm_type: ppo")
    if preset.greedy_run and config.online:
        yield error(f"algorithm_type {name}: its baseline is a greedy run per task, which online runs lack; use ppo")
    if preset.experts and preset.token_advantage is not None:
        yield error(
            f"algorithm.advantage_fn {preset.token_advantage} is computed from rewards in the trainer, and "
            f"demonstrations have no rewards: with {name}, set one that is computed when a "
            "round is judged, such as grpo"
        )


def _penalty_problems(settings: Algorithm, preset: Preset) -> Iterator[Finding]:
    """One line for a KL penalty or a length of the loss that the algorithm cannot use."""
    name = settings.algorithm_type
    if settings.kl_penalty_fn_args.kl_coef and preset.token_advantage is None:
        yield error(
            f"algorithm.kl_penalty_fn_args.kl_coef: {name} has one advantage per row, not one per token, so its "
            "reward cannot include a KL penalty; use kl_loss_fn_args.kl_coef, or ppo or reinforce++"
        )
    elif settings.kl_penalty_fn_args.kl_coef and not preset.needs_reward:
        yield error(
            f"algorithm.kl_penalty_fn_args.kl_coef: {name} uses no reward, so no KL penalty can be subtracted from "
            "the reward; leave it out, or use kl_loss_fn_args.kl_coef"
        )
    if settings.loss_norm_length is not None and preset.loss_agg_mode != "seq-mean-token-sum-norm":
        yield error(
            f"algorithm.loss_norm_length: loss_agg_mode {preset.loss_agg_mode} divides by no constant; leave it out, "
            "or set loss_agg_mode: seq-mean-token-sum-norm"
        )


def _filter_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each filter that has no effect or drops everything."""
    config, preset, settings = run.config, run.algorithm, run.config.algorithm
    name = settings.algorithm_type
    if preset.trains_on != "rollouts" and settings.filters != ExperienceFilters():
        yield error(
            f"algorithm.filters: {name} trains on {preset.trains_on} and has no rewards to filter by; "
            "remove algorithm.filters"
        )
    runs = run.batches.repeat_times
    if settings.filters.zero_variance and preset.trains_on == "rollouts" and runs < 2:
        yield error(
            f"algorithm.filters.zero_variance: with {runs} run per task no group has variance, and every "
            "row would be dropped; set algorithm.repeat_times to 2 or more, or leave out zero_variance"
        )
    overlong = settings.filters.overlong
    if (overlong.max_length or overlong.cache_length) and not preset.overlong_penalty:
        yield error(f"algorithm.filters.overlong: its weight is 0 with {name}; set algorithm.filters.overlong.weight")
    longest = overlong.max_length or config.model.response_limit
    if (cache := overlong.cache_length or 0) > longest:
        yield error(f"algorithm.filters.overlong.cache_length {cache} is more than a response's {longest}")


def _replaced_options(settings: Algorithm, preset: Preset) -> Iterator[Finding]:
    """One line for each option that another option replaces or switches off."""
    experts = settings.experts
    if experts is not None and experts.final_weight is not None and not (experts.warmup_steps or experts.decay_steps):
        yield error(
            f"algorithm.experts.final_weight {experts.final_weight}: without warmup_steps or decay_steps the share is "
            "weight in all steps; set one of them, or leave out final_weight"
        )
    key, given = "algorithm.advantage_fn_args", preset.advantage_args
    if given.get("std_level") == "batch" and given.get("normalize_std") is False:
        yield error(
            f"{key}.std_level batch: normalize_std is false, so no standard deviation is used; set {key}.normalize_std "
            "to true, or leave out std_level"
        )
    options = settings.advantage_fn_args
    if preset.token_advantage == "gae" and options.get("lam_alpha") is not None and "lam" in options:
        yield error(f"{key}.lam: lam_alpha replaces it; leave out one of them (lam_critic is the lam of the returns)")


def _epoch_problems(run: RunSettings) -> Iterator[Finding]:
    """One line if ``algorithm.epochs`` is set, but other keys determine how often a row is trained on."""
    epochs, kind = f"algorithm.epochs {run.config.algorithm.epochs}", run.config.algorithm.algorithm_type
    if run.config.algorithm.epochs == 1:
        return
    if run.offline is not None:
        yield error(f"{epochs}: {kind} trains on a dataset; set buffer.total_epochs instead")
    elif run.batches.dynamic or run.config.buffer.trainer_input.experience_buffer.replay_buffer.enable:
        yield error(
            f"{epochs}: with a dynamic synchronizer.sync_style or a replay_buffer the rows of a step are selected one "
            "by one, and each is trained on once; leave it out"
        )


def _names_critic(settings: Algorithm) -> bool:
    """Whether the user wrote section ``critic``, even with default values.

    A section with all keys and default values does not count: the platform writes such a section when it stores a
    configuration.
    """
    written = "critic" in settings.model_fields_set and settings.critic.model_fields_set != set(Critic.model_fields)
    return written or settings.critic != Critic()


def _adaptation_problems(penalty: KlPenaltyArgs) -> Iterator[Finding]:
    """One line for each key of an adaptive KL coefficient that would have no effect."""
    key = "algorithm.kl_penalty_fn_args"
    if penalty.target is not None and not penalty.kl_coef:
        yield error(f"{key}.target: kl_coef is 0, so no penalty can adapt; set {key}.kl_coef, or leave out target")
    if penalty.horizon != KlPenaltyArgs().horizon and penalty.target is None:
        yield error(f"{key}.horizon: without a target the coefficient is fixed; set {key}.target, or leave out horizon")


_OPERATORS = "data_processor.experience_pipeline.operators"
#: Each key of ``algorithm.filters`` and the operator that does the same.
_REPLACED = {
    "zero_variance": "dynamic_sampling",
    "max_batches": "dynamic_sampling",
    "overlong": "overlong_penalty",
    "reward_threshold": "reward_filter",
}


def data_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each key that would have no effect or does not fit the algorithm."""
    config, preset = run.config, run.algorithm
    name, operators = config.algorithm.algorithm_type, config.data_processor.experience_pipeline.operators
    if operators and preset.trains_on != "rollouts":
        yield error(f"{_OPERATORS}: {name} trains on {preset.trains_on} and has no rewards to process; leave it out")
    sampled = [index for index, entry in enumerate(operators) if entry.name == "dynamic_sampling"]
    runs = run.batches.repeat_times
    for index in sampled if runs < 2 else ():
        yield error(
            f"{_OPERATORS}[{index}]: dynamic_sampling compares the runs of a task, and a task has only {runs} run; set "
            "algorithm.repeat_times to 2 or more, or leave out the operator"
        )
    filters = config.algorithm.filters
    for key, replaced in _REPLACED.items():
        if getattr(filters, key) != getattr(type(filters)(), key) and any(
            entry.name == replaced for entry in operators
        ):
            yield error(
                f"algorithm.filters.{key}: the operator {replaced} of {_OPERATORS} does the same; keep one of the two"
            )
    if filters.max_batches is not None and not sampled and not preset.drop_zero_variance:
        yield error(
            "algorithm.filters.max_batches: no filter drops groups without a learning signal, so no group needs to be "
            "replaced; set algorithm.filters.zero_variance: true, or leave out max_batches"
        )
    yield from _selector_problems(config)


def _selector_problems(config: RftConfig) -> Iterator[Finding]:
    for key, taskset in config.buffer.explorer_input.explored.items():
        chosen = taskset.task_selector
        if chosen.feature_keys and chosen.selector_type not in ("easy_to_hard", "difficulty_based"):
            yield error(
                f"{key}.task_selector.feature_keys: {chosen.selector_type} does not use the difficulty of tasks; leave "
                "it out"
            )


_PATH = "buffer.trainer_input.experience_buffer.path"
_WANTED = {
    "sft": "demonstrations: a column messages, or prompt with response (or completion)",
    "dpo": "preference pairs: columns prompt, chosen and rejected; or, for kto, prompt, completion and label",
    "distill": "conversations for learning the teacher's distribution: columns messages, or prompt with response",
}


def offline_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each setting that is invalid for an offline training or an algorithm that only trains offline."""
    config, preset, kind = run.config, run.algorithm, run.offline
    algorithm = config.algorithm.algorithm_type
    if kind is None:
        if preset.trains_on != "rollouts":
            yield error(
                f"algorithm.algorithm_type {algorithm} trains on {preset.trains_on} and mode {config.mode} explores: "
                f"set mode: train and {_PATH}"
            )
        return
    yield from _dataset_problems(config, kind)
    if config.warm_start is not None:
        yield error(f"warm_start: {algorithm} in mode train starts from model.model_path; remove the section")
    steps = config.offline_steps
    if steps is not None and config.algorithm.optimizer.lr_warmup_steps > steps:
        yield error(
            f"algorithm.optimizer.lr_warmup_steps {config.algorithm.optimizer.lr_warmup_steps} exceeds the {steps} "
            "steps of the run"
        )


def _dataset_problems(config: RftConfig, kind: OfflineKind) -> Iterator[Finding]:
    buffer = config.buffer.trainer_input.experience_buffer
    if not buffer.path:
        yield error(f"{_PATH} is not set: {config.algorithm.algorithm_type} needs {_WANTED[kind]}")
        return
    if is_missing(buffer.path):
        yield error(f"{_PATH} {buffer.path}: no such file or folder; give {_WANTED[kind]}")
    if buffer.storage_type != "file":
        yield error(
            f"buffer.trainer_input.experience_buffer.storage_type {buffer.storage_type}: a dataset "
            "is read from files; remove it"
        )
    if buffer.replay_buffer.enable:
        yield error(
            "buffer.trainer_input.experience_buffer.replay_buffer: an offline training passes over its rows "
            "buffer.total_epochs times; leave it out"
        )


_PLAIN = RolloutCorrection()


def loss_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each part of the algorithm that does not fit the loss, or that the loss does not use.

    An unchanged preset is not checked. If parts are replaced, losses are looked up by name, which imports torch.
    """
    settings = run.config.algorithm
    replaced = (
        settings.advantage_fn,
        settings.policy_loss_fn,
        settings.policy_loss_fn_args,
        settings.loss_agg_mode,
        settings.plugins,
    )
    if not any(replaced) and _is_plain(settings.rollout_correction):
        return
    from rft_platform.algorithms.losses.registry import bind

    try:
        loss = bind(run.spec.policy_loss, run.spec.policy_loss_args)
    except UserError as problem:
        yield error(str(problem), "algorithm.policy_loss_fn")
        return
    yield from _advantage_problems(run, loss)
    yield from _teacher_problems(run, loss)
    yield from _pair_problems(run, loss)
    yield from _loss_data_problems(run, loss)
    yield from _correction_problems(run, loss)


def _is_plain(correction: RolloutCorrection) -> bool:
    """Whether the section ``rollout_correction`` has its default values; mode ``bypass`` is a default, too."""
    return correction.model_copy(update={"mode": None}) == _PLAIN and correction.mode in (None, "bypass")


def _advantage_problems(run: RunSettings, loss: "PolicyLoss") -> Iterator[Finding]:
    """A loss that needs advantages without any; an advantage that the loss does not read."""
    settings, chosen, name = run.config.algorithm, run.algorithm, run.spec.policy_loss
    if loss.policy_gradient and chosen.advantage is None and chosen.token_advantage is None:
        yield error(
            f"algorithm.policy_loss_fn {name} needs advantages and {settings.algorithm_type} computes none: set "
            "algorithm.advantage_fn"
        )
    if settings.advantage_fn is not None and not loss.policy_gradient:
        yield error(f"algorithm.advantage_fn {settings.advantage_fn}: the loss {name} reads no advantage; leave it out")


def _teacher_problems(run: RunSettings, loss: "PolicyLoss") -> Iterator[Finding]:
    """A loss that needs a teacher without one; a teacher that the loss does not use."""
    chosen, kind, name = run.algorithm, run.config.algorithm.algorithm_type, run.spec.policy_loss
    if loss.teacher and not chosen.teacher:
        yield error(f"algorithm.policy_loss_fn {name} needs a teacher, and {kind} has none: set algorithm_type: gkd")
    if chosen.teacher and chosen.token_advantage is None and not loss.teacher:
        yield error(
            f"algorithm.policy_loss_fn {name} learns nothing from the teacher of {kind}: leave it out, or set an "
            "algorithm_type without a teacher"
        )


def _pair_problems(run: RunSettings, loss: "PolicyLoss") -> Iterator[Finding]:
    """A loss of pairs without pairs, or the reverse; a loss that needs a reference model where none is loaded."""
    chosen, kind, name = run.algorithm, run.config.algorithm.algorithm_type, run.spec.policy_loss
    if loss.whole_groups and chosen.trains_on != "preferences":
        yield error(f"algorithm.policy_loss_fn {name} compares pairs: set algorithm_type: dpo")
    elif loss.reference and chosen.reference != "always" and not run.spec.beta:
        yield error(
            f"algorithm.policy_loss_fn {name} needs a reference model, and {kind} loads none: set algorithm_type: dpo "
            "for pairs, or algorithm.kl_loss_fn_args.kl_coef"
        )
    if chosen.trains_on == "preferences" and not loss.whole_groups:
        yield error(
            f"algorithm.policy_loss_fn {name} does not compare pairs, and {kind} trains on pairs: leave it out, or set "
            "the algorithm_type of the loss"
        )


def _loss_data_problems(run: RunSettings, loss: "PolicyLoss") -> Iterator[Finding]:
    """Demonstrations that do not fit the loss; an aggregation that changes the loss's objective."""
    chosen, name = run.algorithm, run.spec.policy_loss
    if run.spec.expert_weight is not None and not loss.experts:
        yield error(
            f"algorithm.experts: the loss {name} cannot train on demonstrations mixed with rollouts; leave out "
            "algorithm.policy_loss_fn, whose default is mix, or set another algorithm_type without experts"
        )
    if loss.loss_agg_modes is not None and chosen.loss_agg_mode not in loss.loss_agg_modes:
        yield error(
            f"algorithm.loss_agg_mode is {chosen.loss_agg_mode}, which changes the objective of the loss {name}: "
            f"set it to {' or '.join(loss.loss_agg_modes)}"
        )


def _correction_problems(run: RunSettings, loss: "PolicyLoss") -> Iterator[Finding]:
    """Options of ``rollout_correction`` that the loss does not use."""
    correction, name = run.config.algorithm.rollout_correction, run.spec.policy_loss
    weighted = run.algorithm.correction == "decoupled" or loss.correction == "weight"
    used = {"weight_cap": weighted or run.spec.beta > 0, "weight_level": weighted, "weight_bound": weighted}
    for key, effect in used.items():
        if getattr(correction, key) != getattr(_PLAIN, key) and not effect:
            yield error(
                f"algorithm.rollout_correction.{key} has no effect on the loss {name} in mode bypass: its own ratio "
                "corrects; set mode: decoupled, or leave it out"
            )
    if correction.sequence_mask_ratio != _PLAIN.sequence_mask_ratio and correction.sequence_mask is None:
        yield error(
            "algorithm.rollout_correction.sequence_mask_ratio has no effect without sequence_mask: set sequence_mask, "
            "or leave it out"
        )
    yield from _mask_problems(correction)
    if not _is_plain(correction) and not loss.policy_gradient:
        yield error(f"algorithm.rollout_correction: the loss {name} uses no log-probs of the engine; leave it out")


def _mask_problems(correction: RolloutCorrection) -> Iterator[Finding]:
    """One line for each mask that excludes the ratio 1, which a token has if engine and trainer agree."""
    key = "algorithm.rollout_correction"
    for name in ("token_mask", "sequence_mask"):
        bounds = getattr(correction, name)
        if bounds is not None and not bounds[0] <= 1 <= bounds[1]:
            yield error(
                f"{key}.{name} {list(bounds)} excludes the ratio 1 of an engine that agrees with the trainer, so "
                "almost nothing is trained: expected low <= 1 <= high, for example [0.5, 5]"
            )
    if correction.token_veto is not None and correction.token_veto >= 1:
        yield error(
            f"{key}.token_veto {correction.token_veto:g} excludes almost every row, because the ratios of its tokens "
            "are about 1: expected less than 1, for example 1e-4"
        )
