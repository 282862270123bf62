"""Checks of section ``algorithm`` against the preset in force: a key that would do nothing is refused."""

from collections.abc import Iterator

from rft_platform.config.algorithm_parts import ExperienceFilters
from rft_platform.config.batches import PresetFacts
from rft_platform.config.schema import RftConfig
from rft_platform.config.trainer import Critic


def algorithm_problems(config: RftConfig, preset: PresetFacts) -> Iterator[str]:
    """One line for each key that is missing, or that the algorithm would not read."""
    settings = config.algorithm
    name = settings.algorithm_type
    if preset.experts and settings.experts is None:
        yield f"algorithm.experts is not set: {name} learns from demonstrations too; give their path"
    if settings.experts is not None and not preset.experts:
        yield f"algorithm.experts: {name} takes no demonstrations; leave it out, or set algorithm_type: mix"
    if settings.teacher_model_path is not None and not preset.teacher:
        yield f"algorithm.teacher_model_path: {name} has no teacher; leave it out, or set algorithm_type: gkd"
    if preset.teacher and settings.teacher_model_path is None and config.mode != "train":
        yield f"algorithm.teacher_model_path is not set: {name} learns from a teacher; name its folder or model"
    if not preset.critic and settings.critic != Critic():
        yield f"algorithm.critic: {name} has no critic; leave it out, or set algorithm_type: ppo"
    if not preset.critic and config.model.critic_model_path is not None:
        yield f"model.critic_model_path: {name} has no critic; leave it out, or set algorithm_type: ppo"
    if settings.kl_penalty_fn_args.kl_coef and preset.token_advantage is None:
        yield (
            f"algorithm.kl_penalty_fn_args.kl_coef: {name} has one advantage a row, not one a token, and no KL can "
            "stand in its reward; use kl_loss_fn_args.kl_coef, or ppo or reinforce++"
        )
    if settings.loss_norm_length is not None and preset.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"algorithm.loss_norm_length: loss_agg_mode {preset.loss_agg_mode} divides by no constant; leave it out, "
            "or set loss_agg_mode: seq-mean-token-sum-norm"
        )
    if preset.trains_on != "rollouts" and settings.filters != ExperienceFilters():
        yield f"algorithm.filters: {name} trains on {preset.trains_on}, which nobody judged; leave it out"
    overlong = settings.filters.overlong
    if (overlong.max_length or overlong.cache_length) and not preset.overlong_penalty:
        yield f"algorithm.filters.overlong: its weight is 0 with {name}; set algorithm.filters.overlong.weight"
    longest = overlong.max_length or config.model.response_limit
    if (overlong.cache_length or 0) > longest:
        yield f"algorithm.filters.overlong.cache_length {overlong.cache_length} is more than a response's {longest}"
