"""Check section ``algorithm`` against the resolved preset: refuse keys that would have no effect."""

from collections.abc import Iterator

from rft_platform.algorithms.presets import Preset
from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.algorithm import Algorithm, Critic, ExperienceFilters, KlPenaltyArgs


def algorithm_problems(run: RunSettings) -> Iterator[str]:
    """One line for each key that is missing or that the algorithm does not read."""
    config, preset, settings = run.config, run.algorithm, run.config.algorithm
    name = settings.algorithm_type
    if preset.experts and settings.experts is None:
        yield f"algorithm.experts is not set: {name} also learns from demonstrations; give their path"
    elif preset.experts and settings.experts is not None and settings.experts.path is None and not config.online:
        yield f"algorithm.experts.path is not set: {name} also learns from demonstrations; give their path"
    if settings.experts is not None and not preset.experts:
        yield f"algorithm.experts: {name} uses no demonstrations; leave it out, or set algorithm_type: mix"
    if settings.teacher_model_path is not None and not preset.teacher:
        yield f"algorithm.teacher_model_path: {name} has no teacher; leave it out, or set algorithm_type: gkd"
    if preset.teacher and settings.teacher_model_path is None and config.mode != "train":
        yield (
            f"algorithm.teacher_model_path is not set: {name} learns from a teacher; give its "
            "folder or Hugging Face name"
        )
    if not preset.critic and _names_critic(settings):
        yield f"algorithm.critic: {name} has no critic; leave it out, or set algorithm_type: ppo"
    if not preset.critic and config.model.critic_model_path is not None:
        yield f"model.critic_model_path: {name} has no critic; leave it out, or set algorithm_type: ppo"
    if preset.greedy_run and config.online:
        yield f"algorithm_type {name}: its baseline is a greedy run of each task, which online runs lack; use ppo"
    if preset.experts and preset.token_advantage is not None:
        yield (
            f"algorithm.advantage_fn {preset.token_advantage} is computed from rewards in the trainer, and "
            f"demonstrations have no rewards: with {name}, set one that is computed when a "
            "round is judged, such as grpo"
        )
    yield from _replaced_options(settings, preset)
    yield from _adaptation_problems(settings.kl_penalty_fn_args)
    if settings.kl_penalty_fn_args.kl_coef and preset.token_advantage is None:
        yield (
            f"algorithm.kl_penalty_fn_args.kl_coef: {name} has one advantage per row, not one per token, so its "
            "reward cannot include a KL penalty; use kl_loss_fn_args.kl_coef, or ppo or reinforce++"
        )
    elif settings.kl_penalty_fn_args.kl_coef and not preset.needs_reward:
        yield (
            f"algorithm.kl_penalty_fn_args.kl_coef: {name} uses no reward, so no KL penalty can be subtracted from "
            "the reward; leave it out, or use kl_loss_fn_args.kl_coef"
        )
    if settings.loss_norm_length is not None and preset.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"algorithm.loss_norm_length: loss_agg_mode {preset.loss_agg_mode} divides by no constant; leave it out, "
            "or set loss_agg_mode: seq-mean-token-sum-norm"
        )
    if preset.trains_on != "rollouts" and settings.filters != ExperienceFilters():
        yield (
            f"algorithm.filters: {name} trains on {preset.trains_on} and has no rewards to filter by; "
            "remove algorithm.filters"
        )
    yield from _epoch_problems(run)
    runs = run.batches.repeat_times
    if settings.filters.zero_variance and preset.trains_on == "rollouts" and runs < 2:
        yield (
            f"algorithm.filters.zero_variance: with {runs} run per task no group has variance, and every "
            "row would be dropped; set algorithm.repeat_times to 2 or more, or leave out zero_variance"
        )
    overlong = settings.filters.overlong
    if (overlong.max_length or overlong.cache_length) and not preset.overlong_penalty:
        yield f"algorithm.filters.overlong: its weight is 0 with {name}; set algorithm.filters.overlong.weight"
    longest = overlong.max_length or config.model.response_limit
    if (overlong.cache_length or 0) > longest:
        yield f"algorithm.filters.overlong.cache_length {overlong.cache_length} is more than a response's {longest}"


def _replaced_options(settings: Algorithm, preset: Preset) -> Iterator[str]:
    """One line for each option that another option replaces or switches off."""
    experts = settings.experts
    if experts is not None and experts.final_weight is not None and not (experts.warmup_steps or experts.decay_steps):
        yield (
            f"algorithm.experts.final_weight {experts.final_weight}: without warmup_steps or decay_steps the share is "
            "weight in all steps; set one of them, or leave out final_weight"
        )
    key, given = "algorithm.advantage_fn_args", preset.advantage_args
    if given.get("std_level") == "batch" and given.get("normalize_std") is False:
        yield (
            f"{key}.std_level batch: normalize_std is false, so no standard deviation is used; set {key}.normalize_std "
            "to true, or leave out std_level"
        )
    options = settings.advantage_fn_args
    if preset.token_advantage == "gae" and options.get("lam_alpha") is not None and "lam" in options:
        yield f"{key}.lam: lam_alpha replaces it; leave out one of them (lam_critic is the lam of the returns)"


def _epoch_problems(run: RunSettings) -> Iterator[str]:
    """One line if ``algorithm.epochs`` is set, but other keys determine how often a row is trained on."""
    epochs = f"algorithm.epochs {run.config.algorithm.epochs}"
    if run.config.algorithm.epochs == 1:
        return
    if run.offline is not None:
        yield f"{epochs}: {run.config.algorithm.algorithm_type} trains on a dataset; set buffer.total_epochs instead"
    elif run.batches.dynamic or run.config.buffer.trainer_input.experience_buffer.replay_buffer.enable:
        yield (
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


def _adaptation_problems(penalty: KlPenaltyArgs) -> Iterator[str]:
    """One line for each key of an adaptive KL coefficient that would have no effect."""
    key = "algorithm.kl_penalty_fn_args"
    if penalty.target is not None and not penalty.kl_coef:
        yield f"{key}.target: kl_coef is 0, so there is no penalty to adapt; set {key}.kl_coef, or leave out target"
    if penalty.horizon != KlPenaltyArgs().horizon and penalty.target is None:
        yield f"{key}.horizon: without a target the coefficient does not adapt; set {key}.target, or leave out horizon"
