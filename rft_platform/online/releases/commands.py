"""Commands of people on versions: list, promote, roll back, start canaries and A/B tests. CLI and HTTP call them.

A version is named by its policy version, which every answer has in its header ``x-policy-version``.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rft_platform.common.errors import UserError, some
from rft_platform.online.releases.routing import BASE, CANDIDATE, Sticky
from rft_platform.online.releases.rules import ReleaseRule, Verdict, ab_rule, ab_verdict, canary_rule, canary_verdict
from rft_platform.online.releases.store import Release, ReleaseStore, Status
from rft_platform.online.traffic.database import FIRST_IMPORTED

Decision = Literal["none", "promote", "rollback", "canary", "ab"]
MOST_FAILURES = 5  #: requests that a candidate may fail to answer


@dataclass(frozen=True, slots=True)
class ServableVersion:
    """One version of the policy that can serve."""

    version: int  # policy version
    round: int | None  # None: another project trained it, and it was imported
    model_version: str | None  # in the model registry
    released: bool  # its evaluation promoted it, or none was due; the newest released version serves by default
    scores: dict[str, float]  # from its evaluation on held-out tasks
    has_weights: bool = True  # False: ``trainer.max_checkpoints_to_keep`` removed them, so it cannot serve


class ReleaseCommands:
    """The commands by which users decide which versions of a project serve."""

    def __init__(
        self,
        store: ReleaseStore,
        versions: Callable[[], Sequence[ServableVersion]],
        automatic_canaries: bool = False,
        withdrawn: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """``versions`` returns the versions that can serve, oldest first.

        ``automatic_canaries``: each newly released version of the project gets a canary (``service.canary_share``).
        ``withdrawn`` returns the versions that no roll-back chooses; None: those that a decision withdrew.
        """
        self.store = store
        self._versions = versions
        self._automatic_canaries = automatic_canaries
        self._withdrawn = withdrawn or self._withdrawn_by_a_decision

    def serving(self) -> int:
        """The version that serves, or the base of the running release."""
        chosen = self.store.served()
        if chosen is not None:
            return chosen
        return newest_released(self._versions())

    def status(self) -> dict[str, Any]:
        """All versions, the serving one (None: the base model, before the first version), and the running release."""
        versions, running, chosen = self._versions(), self.store.running(), self.store.served()
        serving = newest_released(versions) if chosen is None and versions else chosen
        return {
            "serving": serving,
            "chosen": chosen,
            "pinned": self._pinned(versions, chosen, running),
            "release": None if running is None else running.to_json(),
            "versions": [{**asdict(each), "traffic": self._share(each, serving, running)} for each in versions],
        }

    def pinned(self) -> str | None:
        """Why newly released versions do not serve, and the command that ends this; None if they serve."""
        return self._pinned(self._versions(), self.store.served(), self.store.running())

    def _pinned(self, versions: Sequence[ServableVersion], chosen: int | None, running: Release | None) -> str | None:
        if chosen is None or running is not None or (self._automatic_canaries and chosen <= FIRST_IMPORTED):
            return None
        withdrawn = self._withdrawn_by_a_decision()
        released = [each.version for each in versions if each.released]
        waiting = [version for version in released if version > chosen and version not in withdrawn]
        waits = f", and {some([str(version) for version in waiting])} wait" if waiting else ""
        when = "" if released and released[-1] not in withdrawn else "once a better version is released, "
        return (
            f"version {chosen} serves until the next decision{waits}: released versions do not replace a version that "
            f"a decision chose. To serve the newest released version again, {when}run `rft models promote --newest`"
        )

    def promote(self, version: int | None = None, reason: str = "promoted by hand") -> int | None:
        """Serve a version from now on; None: always the newest released one. Ends the version's running release."""
        versions = self._versions()
        if versions or version is not None:
            _servable(versions, newest_released(versions) if version is None else version)
        running = self.store.running()
        if running is not None and version == running.candidate_version:
            self._finish(running, "promoted", version, reason)
        else:
            self.store.serve(version, "promoted", reason)
        return version

    def roll_back(self, version: int | None = None, reason: str = "rolled back by hand") -> int:
        """Serve another version: by default the base of the running release, else the previous released version.

        Versions that were withdrawn from production are served again only if they are named, versions without weights
        never.
        """
        running = self.store.running()
        if version is not None:
            _servable(self._versions(), version)
        target = running.base_version if running is not None and version is None else version
        replaced = self.serving() if running is None else running.base_version
        if target is None:
            target = self._previous(replaced)
        if target is None:
            raise UserError(self._no_previous(replaced))
        if running is not None:
            self._finish(running, "rolled_back", target, reason, replaced=replaced)
        else:
            self.store.serve(target, "rolled_back", reason, replaced=replaced)
        return target

    def fallback(self) -> int | None:
        """The version that a roll-back of the serving one, or of the running release's base, would serve; else None."""
        running = self.store.running()
        return self._previous(self.serving() if running is None else running.base_version)

    def canary(
        self,
        version: int | None = None,
        *,
        share: float = 0.1,
        sticky: Sticky = "conversation",
        rule: ReleaseRule | None = None,
        reason: str = "started by hand",
    ) -> Release:
        """Give a share of the traffic to a version (by default the newest one) until its success rate decides."""
        return self._start("canary", version, share, sticky, rule or canary_rule(), reason)

    def ab_test(
        self,
        version: int | None = None,
        *,
        share: float = 0.5,
        sticky: Sticky = "user",
        rule: ReleaseRule | None = None,
        reason: str = "started by hand",
    ) -> Release:
        """Compare a version (by default the newest one) with the served one; the winner serves in the end."""
        return self._start("ab", version, share, sticky, rule or ab_rule(), reason)

    def report(self, number: int | None = None) -> dict[str, Any]:
        """A release (by default the newest one) with the comparison of its versions so far."""
        found = self.store.newest(1000)
        release = next((each for each in found if number is None or each.number == number), None)
        if release is None:
            raise UserError("there was no canary or A/B test yet" if number is None else f"no release {number}")
        return {**release.to_json(), "comparison": asdict(self.comparison(release))}

    def comparison(self, release: Release) -> Verdict:
        """The comparison of a release's versions so far; those of a canary as an A/B test would compare them."""
        outcomes = self.store.outcomes(release)
        rule = release.rule if release.kind == "ab" else ab_rule()
        return ab_verdict(outcomes[BASE], outcomes[CANDIDATE], rule)

    def decide(self, decision: Decision, version: int | None, share: float | None, reason: str) -> None:
        """Make the decision with this name. ``share`` applies to a canary or an A/B test; None: the default share."""
        shares: dict[str, Any] = {} if share is None else {"share": share}
        if decision == "promote":
            self.promote(version, reason)
        elif decision == "rollback":
            self.roll_back(version, reason)
        elif decision == "canary":
            self.canary(version, reason=reason, **shares)
        elif decision == "ab":
            self.ab_test(version, reason=reason, **shares)

    def compare(self, one: int, other: int) -> dict[str, Any]:
        """Scores of two versions on held-out tasks, and their difference."""
        return compare_scores(self._versions(), one, other)

    def _start(
        self, kind: Any, version: int | None, share: float, sticky: Sticky, rule: ReleaseRule, reason: str
    ) -> Release:
        versions = self._versions()
        newest = newest_released(versions) if version is None else version
        candidate = _servable(versions, newest).version
        return self.store.start(kind, self.serving(), candidate, share, sticky, rule, reason)

    def _finish(self, running: Release, status: Status, version: int, reason: str, **details: Any) -> None:
        """End a release and serve ``version``, also if the release has just ended automatically."""
        if not self.store.finish(running.number, status, version, reason, running.report, **details):
            replaced = {"replaced": self.serving()} if status == "rolled_back" else {}
            self.store.serve(version, status, reason, **replaced)

    def _previous(self, version: int) -> int | None:
        """The newest released version before ``version`` that has weights and was not withdrawn."""
        withdrawn = self._withdrawn()
        return max((each for each in self._earlier(version, True) if each not in withdrawn), default=None)

    def _no_previous(self, version: int) -> str:
        """Why there is no version to roll back to."""
        found = {True: self._earlier(version, True), False: self._earlier(version, False)}
        kept, removed = ([str(each) for each in found[has_weights]] for has_weights in (True, False))
        why = f"; production withdrew {some(kept)}: name one to serve it again" if kept else ""
        gone = f"; the weights of {some(removed)} were removed (trainer.max_checkpoints_to_keep)" if removed else ""
        return f"policy version {version} serves, and there is no earlier released one to roll back to{gone}{why}"

    def _earlier(self, version: int, has_weights: bool) -> list[int]:
        found = (each for each in self._versions() if each.released and each.version < version)
        return [each.version for each in found if each.has_weights is has_weights]

    def _withdrawn_by_a_decision(self) -> set[int]:
        return {version for version, by in self.store.verdicts().items() if by is not None}

    @staticmethod
    def _share(version: ServableVersion, serving: int | None, running: Release | None) -> float:
        if running is not None and version.version == running.candidate_version:
            return running.share
        if version.version != serving:
            return 0.0
        return 1.0 if running is None else 1 - running.share


def newest_released(versions: Sequence[ServableVersion]) -> int:
    """The newest released version. Raises UserError if there is no version at all."""
    if not versions:
        raise UserError("the project has published no version yet")
    return max((each.version for each in versions if each.released), default=versions[0].version)


def compare_scores(versions: Sequence[ServableVersion], one: int, other: int) -> dict[str, Any]:
    """Scores of two versions on held-out tasks, and the differences ``other`` minus ``one``."""
    first, second = _find(versions, one), _find(versions, other)
    both = [name for name in second.scores if name in first.scores]
    return {
        "versions": [asdict(first), asdict(second)],
        "difference": {name: second.scores[name] - first.scores[name] for name in both},
    }


def _find(versions: Sequence[ServableVersion], version: int) -> ServableVersion:
    known = {each.version: each for each in versions}
    if version not in known:
        meant = [each.version for each in versions if each.model_version == str(version)]
        hint = f"; model version {version} is policy version {meant[0]}" if meant else ""
        if not known:
            raise UserError(f"no policy version {version}: the project has published no version yet")
        raise UserError(f"no policy version {version}; the policy versions are: {', '.join(map(str, known))}{hint}")
    return known[version]


def _servable(versions: Sequence[ServableVersion], version: int) -> ServableVersion:
    """The version; raises UserError if there is none, or if its weights were removed."""
    found = _find(versions, version)
    if not found.has_weights:
        kept = ", ".join(str(each.version) for each in versions if each.has_weights) or "none"
        raise UserError(
            f"policy version {version} cannot serve, because its weights were removed "
            f"(trainer.max_checkpoints_to_keep): expected a version whose weights are kept, which are {kept}"
        )
    return found


def decide(store: ReleaseStore, release: Release, failures: int = 0) -> Status:
    """Decide on a release if it has enough labelled runs or units; returns its status.

    ``failures``: requests that the candidate failed to answer.
    """
    if failures >= MOST_FAILURES:
        reason = f"the candidate failed to answer {failures} requests, which the base answered"
        return _finish(store, release, "rolled_back", reason, {})
    if release.kind == "canary":
        runs = store.successes(release)
        verdict = canary_verdict(runs[BASE], runs[CANDIDATE], release.rule, release.looks)
    else:
        outcomes = store.outcomes(release)
        verdict = ab_verdict(outcomes[BASE], outcomes[CANDIDATE], release.rule)
    if verdict.decision != "wait":
        status: Status = "promoted" if verdict.decision == "promote" else "rolled_back"
        return _finish(store, release, status, verdict.reason, asdict(verdict))
    if verdict.looked:
        store.look(release.number, verdict.reason, asdict(verdict))
    return "running"


def reject(store: ReleaseStore, release: Release, reason: str) -> Status:
    """Roll back a candidate that cannot be served."""
    return _finish(store, release, "rolled_back", reason, {})


def _finish(store: ReleaseStore, release: Release, status: Status, reason: str, report: dict[str, object]) -> Status:
    serve = release.candidate_version if status == "promoted" else release.base_version
    if store.finish(release.number, status, serve, reason, report):
        return status
    ended = store.find(release.number)  # a user may have ended the release in the meantime
    return status if ended is None else ended.status
