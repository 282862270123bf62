"""Where a round's training starts: from the policy of the round before or, if that was refused, from the champion.

The gate of the evaluation refuses a version before it serves; a canary, an A/B test or a roll-back withdraws a version
that served. A project that continued from such a version would train it on rows that the served version sampled, and
a version that collapsed would spoil all later ones.
"""

import logging
from pathlib import Path

from rft_platform.common.digests import lacks_state
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Policy,
    RoundEvaluation,
    Start,
    parent_of,
    published,
    read,
    write,
)
from rft_platform.rounds.releases.released import is_released, serving_policy, withdrawn_versions

LOG = logging.getLogger(__name__)

#: What to do if one version after another is refused.
AFTER_REFUSALS = (
    "lower algorithm.optimizer.lr, train on more rows a round (synchronizer.sync_interval), or let smaller gains pass "
    "(evaluation.gate)"
)


def settle_start(project: Project, round_number: int, name: str = DEFAULT_POLICY) -> Policy:
    """The policy that a round's training starts from. An earlier one than that of the round before is recorded.

    This is decided once, before the round trains: a training that is repeated after a crash starts from the same
    weights with the same optimiser state, even if another version was promoted meanwhile.
    """
    record = read(project.store, round_number)
    is_open = name == DEFAULT_POLICY and record.start is None and record.published() is None
    if is_open and project.config.restarts_after_refusal:
        _start_again(project, round_number)
    return parent_of(project.store, round_number, name)


def refused_in_a_row(project: Project, last_round: int) -> dict[int, tuple[Policy, str]]:
    """The policies that were refused or withdrawn since the last accepted one, up to ``last_round``: newest first.

    The keys are rounds; the text says who refused which version. Empty if the policy of ``last_round`` is accepted.
    Rounds without an evaluation are left out.
    """
    store, withdrawn = project.store, withdrawn_versions(project)
    found: dict[int, tuple[Policy, str]] = {}
    for number in range(last_round, 0, -1):
        policy = published(store, number)
        evaluated = read(store, number).evaluated
        passed = None if evaluated is None else evaluated.gate_passed
        if policy is not None and policy.policy_version in withdrawn:
            found[number] = (policy, withdrawn[policy.policy_version])
        elif passed is False and policy is not None:
            found[number] = (policy, f"the gate refused version {policy.policy_version}")
        elif passed or number == last_round or (policy is not None and is_released(project, policy)):
            break
    return found


def newest_refused(project: Project) -> list[Policy]:
    """The policies of ``refused_in_a_row`` up to the newest round that has ended."""
    store = project.store
    last = max((number for number in store.rounds() if read(store, number).has(RoundEvaluation)), default=0)
    return [policy for policy, _ in refused_in_a_row(project, last).values()]


def refusal_hint(project: Project) -> str | None:
    """What to change if one version after another is refused and each training starts again; else None."""
    limit = project.config.service.alerts.refused_in_a_row
    count = len(newest_refused(project)) if limit is not None and project.config.restarts_after_refusal else 0
    return None if count <= (limit or 0) else f"the {count} newest versions were refused: {AFTER_REFUSALS}"


def describe_start(start: Start) -> str:
    """Where a round's training started instead of from the version before, and why."""
    fresh = " with a fresh optimiser (its state was not saved)" if start.fresh_optimizer else ""
    count = f" ({len(start.refused)} in a row)" if len(start.refused) > 1 else ""
    return f"started again from version {start.policy_version}{fresh}, because {start.reason}{count}"


def _start_again(project: Project, round_number: int) -> None:
    """If the policy of the round before was refused and an earlier one serves, record that one as the start."""
    refused = refused_in_a_row(project, round_number - 1)
    serving = serving_policy(project) if refused else None
    newest, reason = next(iter(refused.values()), (None, ""))
    if serving is None or newest is None or serving.weights_digest == newest.weights_digest:
        return
    start = Start(
        round=serving.round,
        policy_version=serving.policy_version,
        refused=sorted(policy.policy_version for policy, _ in refused.values() if policy.round > serving.round),
        reason=reason,
        fresh_optimizer=serving.policy_version > 0 and lacks_state(Path(serving.folder)),
    )
    write(project.store, round_number, start)
    LOG.warning("%s: the training %s", round_key(round_number), describe_start(start))
    if hint := refusal_hint(project):
        LOG.warning("%s", hint)
