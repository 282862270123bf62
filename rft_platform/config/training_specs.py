"""Derive the specifications that the trainer receives: algorithm, adapter and optimizer."""

from rft_platform.algorithms.presets import Preset
from rft_platform.algorithms.spec import (
    AlgorithmSpec,
    CriticSpec,
    ExpertSchedule,
    KlPenaltySpec,
    LoraSpec,
    OptimizerSpec,
)
from rft_platform.config.schema.algorithm import Experts, Optimizer
from rft_platform.config.schema.rft_config import RftConfig


def algorithm_spec(config: RftConfig, chosen: Preset) -> AlgorithmSpec:
    """The algorithm. The critic, if there is one, has no folder and no schedule yet: only a project knows them."""
    settings = config.algorithm
    correction, penalty, critic = settings.rollout_correction, settings.kl_penalty_fn_args, settings.critic
    averaged = chosen.loss_agg_mode == "seq-mean-token-sum-norm"
    return AlgorithmSpec(
        policy_loss=chosen.policy_loss,
        policy_loss_args=dict(chosen.policy_loss_args),
        loss_agg_mode=chosen.loss_agg_mode,
        loss_norm_length=settings.loss_norm_length or (config.model.response_limit if averaged else None),
        beta=settings.beta,
        kl_loss=settings.kl_loss_fn or "k2",
        entropy_coef=settings.entropy_coef,
        token_mask=correction.token_mask,
        row_mask=correction.sequence_mask,
        row_mask_ratio=correction.sequence_mask_ratio,
        token_veto=correction.token_veto,
        correction=chosen.correction,
        weight_cap=correction.weight_cap,
        weight_level=correction.weight_level,
        weight_bound=correction.weight_bound,
        token_advantage=chosen.token_advantage,
        token_advantage_args=dict(chosen.token_advantage_args),
        kl_penalty=KlPenaltySpec(settings.kl_penalty_fn or "k1", penalty.kl_coef, penalty.target, penalty.horizon)
        if penalty.kl_coef
        else None,
        critic=CriticSpec(value_clip=critic.value_clip, warmup_steps=critic.warmup_steps) if chosen.critic else None,
        expert_weight=settings.experts.weight if chosen.experts and settings.experts else None,
        expert_schedule=_expert_schedule(settings.experts) if chosen.experts and settings.experts else None,
        plugins=tuple(settings.plugins),
    )


def _expert_schedule(experts: Experts) -> ExpertSchedule | None:
    if not (experts.warmup_steps or experts.decay_steps):
        return None
    final = experts.weight if experts.final_weight is None else experts.final_weight
    return ExpertSchedule(experts.warmup_steps, experts.decay_steps, final)


def lora_spec(config: RftConfig) -> LoraSpec | None:
    """The adapter to train; None: the full weights."""
    if not config.model.lora_configs:
        return None
    lora = config.model.lora_configs[0]
    modules = lora.target_modules
    return LoraSpec(lora.lora_rank, lora.lora_alpha, modules if isinstance(modules, str) else tuple(modules))


def optimizer_spec(settings: Optimizer, run_steps: int, start: int = 0) -> OptimizerSpec:
    """AdamW as configured, scheduled from step ``start``; a decay ends with the run if no other end is configured.

    A run that ends within its warm-up has no decay; its learning rates are those at the start of a longer run.
    """
    given = settings.model_dump(include=set(Optimizer.model_fields))
    end = settings.total_steps or max(run_steps, start + settings.lr_warmup_steps + 1)
    return OptimizerSpec(**given | {"schedule_start": start, "total_steps": end})
