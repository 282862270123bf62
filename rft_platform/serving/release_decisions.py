"""Automatic decisions on the running release: canaries by their verdict, A/B tests by their report."""

from dataclasses import asdict

from rft_platform.serving.release_commands import compare_arms
from rft_platform.serving.release_store import Release, ReleaseStore, Status
from rft_platform.serving.releases.ab_test import ABRule
from rft_platform.serving.releases.assignment import BASE, CANDIDATE
from rft_platform.serving.releases.canary import CanaryRule, canary_verdict

MOST_FAILURES = 5  #: requests that a candidate may fail to answer


def decide(store: ReleaseStore, release: Release, failures: int = 0) -> Status:
    """Decide on a release if it has enough labelled runs or units; returns its status.

    ``failures``: requests that the candidate failed to answer.
    """
    if failures >= MOST_FAILURES:
        reason = f"the candidate failed to answer {failures} requests, which the base answered"
        return _finish(store, release, "rolled_back", reason, {})
    if isinstance(release.rule, CanaryRule):
        return _decide_canary(store, release, release.rule)
    return _decide_ab_test(store, release, release.rule)


def reject(store: ReleaseStore, release: Release, reason: str) -> Status:
    """Roll back a candidate that cannot be served."""
    return _finish(store, release, "rolled_back", reason, {})


def _decide_canary(store: ReleaseStore, release: Release, rule: CanaryRule) -> Status:
    outcomes = store.outcomes(release)
    verdict = canary_verdict(outcomes[BASE].successes, outcomes[CANDIDATE].successes, rule, release.looks)
    if verdict.decision == "wait":
        if verdict.looked:
            store.look(release.number, verdict.reason, asdict(verdict))
        return "running"
    status: Status = "promoted" if verdict.decision == "promote" else "rolled_back"
    return _finish(store, release, status, verdict.reason, asdict(verdict))


def _decide_ab_test(store: ReleaseStore, release: Release, rule: ABRule) -> Status:
    report = compare_arms(store, release, rule)
    if not report.complete:
        return "running"
    status: Status = "promoted" if report.winner == CANDIDATE else "rolled_back"
    return _finish(store, release, status, report.reason, report.to_json())


def _finish(store: ReleaseStore, release: Release, status: Status, reason: str, report: dict[str, object]) -> Status:
    serve = release.candidate_version if status == "promoted" else release.base_version
    if store.finish(release.number, status, serve, reason, report):
        return status
    ended = store.find(release.number)  # a user may have ended the release in the meantime
    return status if ended is None else ended.status
