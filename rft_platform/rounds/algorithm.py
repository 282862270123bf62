"""Translate the configured algorithm into the trainer's AlgorithmSpec, and check that its parts fit together."""

from rft_platform.algorithms.plugins import import_plugins, plugins_digest
from rft_platform.config.algorithm_parts import RolloutCorrection
from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema import RftConfig
from rft_platform.errors import UserError
from rft_platform.training.protocol import AlgorithmSpec, CriticSpec, KlPenaltySpec

_PLAIN = RolloutCorrection()


def loaded_digest(config: RftConfig) -> str | None:
    """Import the plugins and return the digest of their code; None without plugins."""
    import_plugins(config.algorithm.plugins)
    return plugins_digest(config.algorithm.plugins)


def algorithm_spec(run: RunSettings) -> AlgorithmSpec:
    """The configured algorithm as the trainer receives it; a critic gets the default CriticSpec (``critic_spec``)."""
    config, settings, chosen = run.config, run.config.algorithm, run.algorithm
    correction, penalty = settings.rollout_correction, settings.kl_penalty_fn_args
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
        correction=correction.mode,
        weight_cap=correction.weight_cap,
        token_advantage=chosen.token_advantage,
        token_advantage_args=dict(chosen.token_advantage_args),
        kl_penalty=KlPenaltySpec(settings.kl_penalty_fn or "k1", penalty.kl_coef, penalty.target, penalty.horizon)
        if penalty.kl_coef
        else None,
        critic=CriticSpec() if chosen.critic else None,
        expert_weight=settings.experts.weight if chosen.experts and settings.experts else None,
        plugins=tuple(settings.plugins),
    )


def check_algorithm(run: RunSettings) -> None:
    """Raise UserError if a part of the algorithm does not exist, does not fit the other parts, or would have no effect.

    An unchanged preset is not checked. If parts are replaced, losses are looked up by name, which imports torch.
    """
    settings = run.config.algorithm
    replaced = (settings.advantage_fn, settings.policy_loss_fn, settings.policy_loss_fn_args, settings.plugins)
    if not any(replaced) and settings.rollout_correction == _PLAIN:
        return
    from rft_platform.algorithms.losses.registry import bind

    chosen, spec = run.algorithm, algorithm_spec(run)
    loss = bind(spec.policy_loss, spec.policy_loss_args)
    problems = []
    if loss.policy_gradient and chosen.advantage is None and chosen.token_advantage is None:
        problems.append(
            f"algorithm.policy_loss_fn {spec.policy_loss} follows advantages and {settings.algorithm_type} makes none: "
            "set algorithm.advantage_fn"
        )
    if settings.advantage_fn is not None and not loss.policy_gradient:
        problems.append(
            f"algorithm.advantage_fn {settings.advantage_fn}: the loss {spec.policy_loss} reads no advantage; "
            "leave it out"
        )
    if spec.expert_weight is not None and not loss.experts:
        problems.append(
            f"algorithm.experts: the loss {spec.policy_loss} learns nothing from demonstrations among rollouts; leave "
            "out algorithm.policy_loss_fn, which is mix then, or set another algorithm_type without experts"
        )
    if loss.teacher and not chosen.teacher:
        problems.append(
            f"algorithm.policy_loss_fn {spec.policy_loss} learns from a teacher, and {settings.algorithm_type} has "
            "none: set algorithm_type: gkd"
        )
    if chosen.teacher and chosen.token_advantage is None and not loss.teacher:
        problems.append(
            f"algorithm.policy_loss_fn {spec.policy_loss} learns nothing from the teacher of "
            f"{settings.algorithm_type}: leave it out, or set an algorithm_type without a teacher"
        )
    if loss.whole_groups and chosen.trains_on != "preferences":
        problems.append(f"algorithm.policy_loss_fn {spec.policy_loss} compares pairs: set algorithm_type: dpo")
    correction = settings.rollout_correction
    weighted = correction.mode == "decoupled" or loss.correction == "weight" or spec.beta > 0
    if correction.weight_cap != _PLAIN.weight_cap and not weighted:
        problems.append(
            f"algorithm.rollout_correction.weight_cap has no effect on the loss {spec.policy_loss} in mode bypass: its "
            "own ratio corrects; set mode: decoupled, or leave it out"
        )
    if correction != _PLAIN and not loss.policy_gradient:
        problems.append(
            f"algorithm.rollout_correction: the loss {spec.policy_loss} uses no log-probs of the engine; leave it out"
        )
    if problems:
        raise UserError("\n".join(problems))
