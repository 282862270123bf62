"""Asset checks: conditions that block a round from training, and conditions to be reviewed by a person.

A check of a partitioned asset has a result for each round, so that a good round does not hide a bad one before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import dagster as dg

from rft_platform.assets.common import round_check, rounded
from rft_platform.evaluation.gate import RegressionResult
from rft_platform.experience.quality import JudgedQuality, RolloutQuality
from rft_platform.tasks.task import Task
from rft_platform.training.protocol import StepEvent

if TYPE_CHECKING:
    from rft_platform.rounds.reporting.reward_audit import Finding

EXPERIENCE_CHECKS = [
    round_check(
        "rows_are_sound",
        asset="judged_experiences",
        blocking=True,
        description="Equal lengths, finite log-probs, rewards and advantages, unique rows, every rollout judged once.",
    ),
    round_check(
        "groups_are_complete",
        asset="judged_experiences",
        blocking=True,
        description="Every task has all its runs, or as many as explorer.group_policy permits.",
    ),
    round_check(
        "one_policy_version",
        asset="judged_experiences",
        description="One policy version sampled all rows of the round.",
    ),
    round_check(
        "rewards_differ",
        asset="judged_experiences",
        description="At least one group has differing rewards; otherwise the round trains nothing.",
    ),
    round_check(
        "audit_parts",
        asset="judged_experiences",
        description="Audit: no part of a weighted judge explains nearly all of the variance of the reward.",
    ),
    round_check(
        "audit_length",
        asset="judged_experiences",
        description="Audit: the sampled tokens of a run have neither doubled nor halved since the first rounds.",
    ),
    round_check(
        "audit_groups",
        asset="judged_experiences",
        description="Audit: enough groups have differing rewards.",
    ),
    round_check(
        "audit_tool_calls",
        asset="judged_experiences",
        description="Audit: the share of runs that call a tool has not halved since the first rounds.",
    ),
]

CHECKPOINT_CHECKS = [
    round_check(
        "engine_agrees_with_trainer",
        asset="policy_checkpoint",
        description="The mean |delta log-prob| between engine and trainer is small.",
    ),
    round_check(
        "weights_changed",
        asset="policy_checkpoint",
        description="The round made at least one optimiser step.",
    ),
]


def leak_spec(asset: str, description: str, *, each_round: bool = True) -> dg.AssetCheckSpec:
    """Check that a dataset contains no held-out tasks (such a task is a *leak*); ``leak_result`` builds the result."""
    if each_round:
        return round_check("no_leaks", asset=asset, description=description)
    return dg.AssetCheckSpec("no_leaks", asset=asset, description=description)


def leak_result(leaks: Sequence[Task]) -> dg.AssetCheckResult:
    """Result of the check of ``leak_spec``; if there are leaks, a warning with the first leaked prompts."""
    return dg.AssetCheckResult(
        check_name="no_leaks",
        passed=not leaks,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"leaked_prompts": dg.MetadataValue.json([task.prompt for task in leaks[:10]])},
    )


def checkpoint_specs(asset: str) -> list[dg.AssetCheckSpec]:
    """Checks of the weights of an offline training; ``offline_results`` builds their results."""
    return [
        round_check(
            "weights_changed",
            asset=asset,
            description="The training made at least one optimiser step.",
        ),
        round_check(
            "loss_fell",
            asset=asset,
            description="The loss of the last tenth of the steps is below the first tenth's.",
        ),
    ]


EVALUATION_CHECKS = [
    round_check(
        "gate",
        asset="evaluation_report",
        description="The policy is better than the champion by the rule of evaluation.gate and becomes the champion. "
        "If the check fails, the champion stays; the round is complete in both cases.",
    ),
    round_check(
        "no_regression",
        asset="evaluation_report",
        description="On the regression set (evaluation.regression) the policy is not worse than the start by more than "
        "the tolerance. If the check fails, the policy does not become the champion.",
    ),
    round_check(
        "audit_held_out",
        asset="evaluation_report",
        description="Audit: where the training reward rose clearly, the held-out result rose, too.",
    ),
]

#: Mean |delta log-prob| in nats that needs review: far above rounding errors, below values that harm training.
MISMATCH_WARNING = 0.05


def experience_results(
    rollouts: RolloutQuality, judged: JudgedQuality, audit: "Sequence[Finding]"
) -> list[dg.AssetCheckResult]:
    """Results of ``EXPERIENCE_CHECKS``."""
    details = {**asdict(rollouts), **asdict(judged)}
    sound = {name: value for name, value in details.items() if isinstance(value, tuple) and name != "policy_versions"}
    return [
        _result("rows_are_sound", rollouts.sound and judged.sound, dg.AssetCheckSeverity.ERROR, sound),
        _result(
            "groups_are_complete",
            not rollouts.incomplete_groups,
            dg.AssetCheckSeverity.ERROR,
            {"incomplete_groups": rollouts.incomplete_groups},
        ),
        _result(
            "one_policy_version",
            len(rollouts.policy_versions) == 1,
            dg.AssetCheckSeverity.WARN,
            {"policy_versions": rollouts.policy_versions},
        ),
        _result(
            "rewards_differ",
            judged.zero_variance_share < 1.0,
            dg.AssetCheckSeverity.WARN,
            {"zero_variance_share": judged.zero_variance_share},
        ),
        *map(audited, audit),
    ]


def checkpoint_results(steps: int, mismatch: float | None) -> list[dg.AssetCheckResult]:
    """Results of ``CHECKPOINT_CHECKS``. ``mismatch`` is in nats, None if the round does not allow a measurement."""
    return [
        _result(
            "engine_agrees_with_trainer",
            mismatch is None or mismatch <= MISMATCH_WARNING,
            dg.AssetCheckSeverity.WARN,
            {"mean_abs_delta_logprob": mismatch, "limit": MISMATCH_WARNING},
        ),
        _result("weights_changed", steps > 0, dg.AssetCheckSeverity.WARN, {"optimizer_steps": steps}),
    ]


def offline_results(steps: Sequence[StepEvent]) -> list[dg.AssetCheckResult]:
    """Results of ``checkpoint_specs``. The loss check passes for a single step: there are no two losses to compare."""
    losses = [step.metrics["loss"] for step in steps]
    part = max(1, len(losses) // 10)
    first, last = (sum(losses[:part]) / part, sum(losses[-part:]) / part) if losses else (0.0, 0.0)
    return [
        _result("weights_changed", bool(steps), dg.AssetCheckSeverity.WARN, {"optimizer_steps": len(steps)}),
        _result(
            "loss_fell",
            len(losses) < 2 or last < first,
            dg.AssetCheckSeverity.WARN,
            {"first_tenth": first, "last_tenth": last},
        ),
    ]


def evaluation_results(
    gate_passed: bool | None, decision: str, regression: RegressionResult | None, audit: "Finding"
) -> list[dg.AssetCheckResult]:
    """Results of ``EVALUATION_CHECKS``. A check about which this evaluation decided nothing (None) passes."""
    kept = regression is None or regression.decision.passed
    found = {} if regression is None else {"decision": regression.decision.reason, **regression.figures()}
    return [
        _result("gate", gate_passed is not False, dg.AssetCheckSeverity.WARN, {"decision": decision}),
        _result("no_regression", kept, dg.AssetCheckSeverity.WARN, found),
        audited(audit),
    ]


def audited(finding: "Finding") -> dg.AssetCheckResult:
    """The result of an audit of the rewards."""
    return _result(
        finding.name, finding.passed, dg.AssetCheckSeverity.WARN, {"finding": finding.text, **finding.figures}
    )


def _result(
    name: str, passed: bool, severity: dg.AssetCheckSeverity, details: Mapping[str, Any]
) -> dg.AssetCheckResult:
    metadata = {name: _detail(value) for name, value in details.items()}
    return dg.AssetCheckResult(check_name=name, passed=passed, severity=severity, metadata=metadata)


def _detail(value: Any) -> Any:
    if isinstance(value, tuple):
        return dg.MetadataValue.json(list(value))
    return rounded(value) if isinstance(value, float) else value
