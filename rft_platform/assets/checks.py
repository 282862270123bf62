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


def _specs(asset: str, descriptions: Mapping[str, str], blocking: Sequence[str] = ()) -> list[dg.AssetCheckSpec]:
    """A check for each name; those in ``blocking`` keep the round from training."""
    return [
        round_check(name, asset=asset, description=description, blocking=name in blocking)
        for name, description in descriptions.items()
    ]


EXPERIENCE_CHECKS = _specs(
    "judged_experiences",
    {
        "rows_are_sound": "Equal lengths, finite log-probs, rewards and advantages, unique rows, every rollout judged "
        "once.",
        "groups_are_complete": "Every task has all its runs, or as many as explorer.group_policy permits.",
        "one_policy_version": "One policy version sampled all rows of the round.",
        "rewards_differ": "At least one group has differing rewards; otherwise the round trains nothing.",
        "judge_succeeded": "The judge failed on no run. `rft trace ROW` shows the error of a row.",
        "audit_parts": "Audit: no part of a weighted judge explains nearly all of the variance of the reward.",
        "audit_length": "Audit: the sampled tokens of a run have neither doubled nor halved since the first rounds.",
        "audit_groups": "Audit: enough groups have differing rewards.",
        "audit_tool_calls": "Audit: the share of runs that call a tool has not halved since the first rounds.",
    },
    blocking=("rows_are_sound", "groups_are_complete"),
)

CHECKPOINT_CHECKS = _specs(
    "policy_checkpoint",
    {
        "engine_agrees_with_trainer": "The mean |delta log-prob| between engine and trainer is small.",
        "weights_changed": "The round made at least one optimiser step.",
    },
)


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
    descriptions = {
        "weights_changed": "The training made at least one optimiser step.",
        "loss_fell": "The loss of the last tenth of the steps is below the first tenth's.",
    }
    return _specs(asset, descriptions)


EVALUATION_CHECKS = _specs(
    "evaluation_report",
    {
        "gate": "The policy is better than the champion by the rule of evaluation.gate and becomes the champion. "
        "If the check fails, the champion stays; the round is complete in both cases.",
        "no_regression": "On the regression set (evaluation.regression) the policy is not worse than the start by more "
        "than the tolerance. If the check fails, the policy does not become the champion.",
        "audit_held_out": "Audit: where the training reward rose clearly, the held-out result rose, too.",
    },
)

#: Mean |delta log-prob| in nats that needs review: far above rounding errors, below values that harm training.
MISMATCH_WARNING = 0.05


def experience_results(
    rollouts: RolloutQuality, judged: JudgedQuality, audit: "Sequence[Finding]"
) -> list[dg.AssetCheckResult]:
    """Results of ``EXPERIENCE_CHECKS``."""
    details = {**asdict(rollouts), **asdict(judged)}
    others = ("policy_versions", "first_judge_errors")
    sound = {name: value for name, value in details.items() if isinstance(value, tuple) and name not in others}
    incomplete, versions, error = rollouts.incomplete_groups, rollouts.policy_versions, dg.AssetCheckSeverity.ERROR
    return [
        _result("rows_are_sound", rollouts.sound and judged.sound, sound, error),
        _result("groups_are_complete", not incomplete, {"incomplete_groups": incomplete}, error),
        _result("one_policy_version", len(versions) == 1, {"policy_versions": versions}),
        _result(
            "rewards_differ", judged.zero_variance_share < 1.0, {"zero_variance_share": judged.zero_variance_share}
        ),
        _result(
            "judge_succeeded",
            not judged.judge_errors,
            {"failed_runs": judged.judge_errors, "first_rows": judged.first_judge_errors},
        ),
        *map(audited, audit),
    ]


def checkpoint_results(steps: int, mismatch: float | None) -> list[dg.AssetCheckResult]:
    """Results of ``CHECKPOINT_CHECKS``. ``mismatch`` is in nats, None if the round does not allow a measurement."""
    return [
        _result(
            "engine_agrees_with_trainer",
            mismatch is None or mismatch <= MISMATCH_WARNING,
            {"mean_abs_delta_logprob": mismatch, "limit": MISMATCH_WARNING},
        ),
        _result("weights_changed", steps > 0, {"optimizer_steps": steps}),
    ]


def offline_results(steps: Sequence[StepEvent]) -> list[dg.AssetCheckResult]:
    """Results of ``checkpoint_specs``. The loss check passes for a single step: there are no two losses to compare."""
    losses = [step.metrics["loss"] for step in steps]
    part = max(1, len(losses) // 10)
    first, last = (sum(losses[:part]) / part, sum(losses[-part:]) / part) if losses else (0.0, 0.0)
    return [
        _result("weights_changed", bool(steps), {"optimizer_steps": len(steps)}),
        _result(
            "loss_fell",
            len(losses) < 2 or last < first,
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
        _result("gate", gate_passed is not False, {"decision": decision}),
        _result("no_regression", kept, found),
        audited(audit),
    ]


def audited(finding: "Finding") -> dg.AssetCheckResult:
    """The result of an audit of the rewards."""
    return _result(finding.name, finding.passed, {"finding": finding.text, **finding.figures})


def _result(
    name: str,
    passed: bool,
    details: Mapping[str, Any],
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.WARN,
) -> dg.AssetCheckResult:
    metadata = {name: _detail(value) for name, value in details.items()}
    return dg.AssetCheckResult(check_name=name, passed=passed, severity=severity, metadata=metadata)


def _detail(value: Any) -> Any:
    if isinstance(value, tuple):
        return dg.MetadataValue.json(list(value))
    return rounded(value) if isinstance(value, float) else value
