"""Releases in the database: one at a time, every decision with its reason, outcomes by unit."""

import pytest
from sqlalchemy import event

from rft_platform.common.errors import UserError
from rft_platform.online.releases.commands import MOST_FAILURES, ReleaseCommands, ServableVersion, decide
from rft_platform.online.releases.rules import Successes, ab_rule, canary_rule
from rft_platform.online.releases.store import Release, ReleaseStore
from rft_platform.online.traffic.database import FIRST_IMPORTED, open_database
from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.store import TrafficStore

VERSIONS = [
    ServableVersion(version, version, str(version), version < 3, {"reward": version / 10}) for version in range(4)
]


class Traffic:
    """A traffic database with its releases."""

    def __init__(self, url: str) -> None:
        self.engine = engine = open_database(url)
        self.store, self.traffic = ReleaseStore(engine), TrafficStore(engine)
        self.commands = ReleaseCommands(self.store, lambda: VERSIONS)
        self._count = 0

    def answer(self, variant: str, reward: float | None, **place: str) -> str:
        """One answered call of a variant, with its reward."""
        self._count += 1
        msg_id = f"m{self._count}"
        call = {"duration_s": 0.5 + (self._count % 7) / 100}
        self.traffic.record([NewCall(msg_id, 0, call, 1, 10, 0.0, variant=variant, **place)])
        if reward is not None:
            self.traffic.give_feedback(NewFeedback(f"f{self._count}", [msg_id], reward))
        return msg_id

    def kinds(self) -> list[str]:
        return [event.kind for event in reversed(self.traffic.events())]


@pytest.fixture
def made(database_url) -> Traffic:
    return Traffic(database_url)


def test_the_newest_released_version_serves_until_one_is_chosen(made) -> None:
    assert made.commands.serving() == 2, "version 3 is not released"
    made.commands.promote(3, "looks good")
    assert made.store.served() == made.commands.serving() == 3
    assert made.commands.roll_back() == 2
    assert made.commands.roll_back() == 1
    assert made.commands.roll_back(0, "of old") == 0
    with pytest.raises(UserError, match="no earlier released one"):
        made.commands.roll_back()
    made.commands.promote(None)
    assert made.commands.serving() == 2
    (event,) = [event for event in made.traffic.events() if event.reason == "of old"]
    assert (event.kind, event.details) == ("rolled_back", {"version": 0, "replaced": 1})
    with pytest.raises(UserError, match="no policy version 9; the policy versions are: 0, 1, 2, 3"):
        made.commands.promote(9)


def test_the_newest_decision_determines_whether_a_version_is_withdrawn(made) -> None:
    for version, ended in ((3, "rolled_back"), (1, "promoted")):
        release = made.commands.canary(version)
        made.store.finish(release.number, ended, 2 if ended == "rolled_back" else 1, "decided", {})
    assert made.store.verdicts() == {3: "canary 1", 2: None, 1: None}
    made.commands.ab_test(2)
    made.commands.roll_back()
    assert made.store.verdicts() == {3: "canary 1", 2: "A/B test 3", 1: None}
    made.commands.roll_back()
    made.commands.promote(3)
    assert made.store.verdicts() == {3: None, 2: "A/B test 3", 1: "a roll-back", 0: None}


def test_a_service_that_ignores_released_versions_names_them_and_the_command(made) -> None:
    assert made.commands.pinned() is None, "no decision was made"
    made.commands.roll_back()
    rolled_back = made.commands.pinned()
    assert rolled_back == made.commands.status()["pinned"]
    assert rolled_back is not None and rolled_back.startswith("version 1 serves until the next decision: released")
    assert "once a better version is released, run `rft models promote --newest`" in rolled_back, "2 is withdrawn"
    newer = [*VERSIONS, ServableVersion(4, 4, "4", True, {}), ServableVersion(5, 5, "5", True, {})]
    pinned = ReleaseCommands(made.store, lambda: newer).pinned()
    assert pinned is not None and "version 1 serves until the next decision, and 4, 5 wait" in pinned
    assert pinned.endswith("To serve the newest released version again, run `rft models promote --newest`")
    assert ReleaseCommands(made.store, lambda: newer, automatic_canaries=True).pinned() is None
    made.commands.promote(None)
    assert made.commands.pinned() is None


def test_a_lost_canary_keeps_the_base_version_in_service(made) -> None:
    release = made.commands.canary(3)
    assert made.commands.pinned() is None, "the canary decides"
    made.store.finish(release.number, "rolled_back", 2, "worse", {})
    pinned = made.commands.pinned()
    assert pinned is not None and "version 2 serves until the next decision" in pinned


def test_an_imported_version_serves_until_the_next_decision_also_with_canaries(made) -> None:
    versions = [*VERSIONS, ServableVersion(FIRST_IMPORTED + 1, None, "1", False, {})]
    commands = ReleaseCommands(made.store, lambda: versions, automatic_canaries=True)
    commands.promote(FIRST_IMPORTED + 1)
    assert "version 1000000001 serves until" in str(commands.pinned())


def test_a_rollback_skips_versions_that_were_not_released(made) -> None:
    versions = [ServableVersion(version, version, None, version != 1, {}) for version in range(3)]
    assert ReleaseCommands(made.store, lambda: versions).roll_back() == 0


def test_a_version_without_weights_never_serves(made) -> None:
    versions = [ServableVersion(n, n, None, True, {}, has_weights=n in (1, 3)) for n in range(5)]
    commands = ReleaseCommands(made.store, lambda: versions)
    refused = r"version 2 cannot serve, because its weights were removed \(trainer.max_.* are kept, which are 1, 3"
    for command in (commands.promote, commands.roll_back, commands.canary, commands.ab_test):
        with pytest.raises(UserError, match=refused):
            command(2)
    with pytest.raises(UserError, match="version 4 cannot serve"):
        commands.promote(None)
    commands.promote(3)
    assert (commands.fallback(), commands.roll_back(), commands.fallback()) == (1, 1, None)
    with pytest.raises(UserError, match="no earlier released one to roll back to; the weights of 0 were removed"):
        commands.roll_back()


def test_a_rollback_skips_versions_that_production_withdrew(made) -> None:
    made.commands.promote(1)
    lost = made.commands.canary(2)
    made.store.finish(lost.number, "rolled_back", 1, "worse", {})
    won = made.commands.canary(3)
    made.store.finish(won.number, "promoted", 3, "better", {})
    assert made.commands.roll_back() == 1
    made.commands.promote(2, "chosen again by hand")
    made.commands.promote(3)
    assert made.commands.roll_back() == 2
    assert (made.commands.roll_back(), made.commands.roll_back()) == (1, 0)
    made.commands.roll_back(1)
    with pytest.raises(UserError, match="no earlier released one to roll back to; production withdrew 0: name one"):
        made.commands.roll_back()
    assert made.commands.roll_back(0) == 0


def test_a_decision_holds_although_the_release_ends_meanwhile(made, monkeypatch) -> None:
    for decide_by_hand, ended, served in (
        (lambda: made.commands.roll_back(), "promoted", 2),
        (lambda: made.commands.promote(3), "rolled_back", 3),
    ):
        made.commands.promote(None)
        release = made.commands.canary(3)
        made.store.finish(release.number, ended, 3 if ended == "promoted" else 2, "decided by itself", {})
        with monkeypatch.context() as patch:
            found = iter([release])
            patch.setattr(made.store, "running", lambda found=found: next(found, None))
            decide_by_hand()
        assert made.store.served() == served


def test_a_rollback_to_a_named_version_withdraws_the_base_that_it_replaces(made) -> None:
    made.commands.promote(1)
    made.commands.canary(2)
    assert made.commands.roll_back(0, "1 is bad too") == 0
    assert made.store.verdicts() == {2: "canary 1", 1: "a roll-back", 0: None}
    made.commands.promote(3)
    assert made.commands.roll_back() == 0


def test_a_rollback_withdraws_the_candidate_that_was_promoted_meanwhile(made, monkeypatch) -> None:
    made.commands.promote(1)
    release = made.commands.canary(2)
    made.store.finish(release.number, "promoted", 2, "decided by itself", {})
    with monkeypatch.context() as patch:
        found = iter([release])
        patch.setattr(made.store, "running", lambda: next(found, None))
        assert made.commands.roll_back() == 1
    assert made.store.verdicts() == {2: "a roll-back", 1: None}


def test_one_release_runs_at_a_time(made) -> None:
    release = made.commands.canary(3, share=0.25)
    assert made.store.running() == release
    traffic = {each["version"]: each["traffic"] for each in made.commands.status()["versions"]}
    assert traffic == {0: 0.0, 1: 0.0, 2: 0.75, 3: 0.25}
    with pytest.raises(UserError, match="only one release"):
        made.commands.ab_test(1)
    with pytest.raises(UserError, match="promote it or roll it back"):
        made.commands.promote(1)
    made.commands.roll_back()
    assert (made.store.running(), made.store.served()) == (None, 2)
    assert made.store.newest()[0].status == "rolled_back"
    made.commands.ab_test(3)
    made.commands.promote(3)
    assert (made.store.running(), made.store.served()) == (None, 3)
    assert made.kinds() == ["canary_started", "canary_rolled_back", "ab_started", "ab_promoted"]
    for wrong in (3, 7):
        with pytest.raises(UserError):
            made.commands.canary(wrong)
    with pytest.raises(UserError, match="share"):
        made.commands.canary(1, share=1.0)


def fill(made: Traffic, release: Release, base: float, candidate: float, runs: int = 100) -> None:
    for arm, rate in (("base", base), ("candidate", candidate)):
        for number in range(runs):
            reward = float(number < rate * runs)
            made.answer(f"{release.number}/{arm}", reward, subject=f"{arm}-{number % (runs // 2)}")


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "status", "serves"), [(0.9, "promoted", 3), (0.1, "rolled_back", 2)])
def test_canaries_are_decided_automatically(made, rate, status, serves) -> None:
    release = made.commands.canary(3, rule=canary_rule(least_runs=100))
    assert decide(made.store, release) == "running"
    fill(made, release, 0.5, rate)
    assert decide(made.store, release) == status
    assert made.store.served() == serves
    assert "success rate" in made.traffic.events()[0].reason
    assert made.store.finish(release.number, "promoted", 3, "late", {}) is False, "the first decision counts"


def test_a_canary_decides_at_its_last_look(made) -> None:
    release = made.commands.canary(3, rule=canary_rule(least_runs=20, looks=2))
    fill(made, release, 0.5, 0.5, runs=20)
    assert decide(made.store, release) == "running"
    release = made.store.running()
    assert release.looks == 1
    assert decide(made.store, release) == "running"
    assert made.store.running().looks == 1, "the next look needs 40 runs"
    fill(made, release, 0.5, 0.5, runs=20)
    assert decide(made.store, made.store.running()) == "rolled_back"


def test_a_candidate_that_does_not_answer_is_rolled_back(made) -> None:
    release = made.commands.canary(3)
    assert decide(made.store, release, MOST_FAILURES - 1) == "running"
    assert decide(made.store, release, MOST_FAILURES) == "rolled_back"


@pytest.mark.slow
def test_ab_tests_are_decided_automatically_and_reported(made) -> None:
    release = made.commands.ab_test(3, rule=ab_rule(units=50))
    fill(made, release, 0.3, 0.9)
    liked = made.answer(f"{release.number}/candidate", 1.0, subject="ann")
    made.traffic.give_feedback(NewFeedback("s", [liked], 4.0, metric="satisfaction"))
    rated = {"user_feedback": {"rating": 2.0}}
    made.traffic.give_feedback(NewFeedback("r", [liked], 1.0, request=rated, comment="fine"))
    assert made.store.outcomes(release)["candidate"]["satisfaction"] == [3.0]
    assert decide(made.store, release) == "promoted"
    report = made.commands.report()
    accuracy, latency, _ = report["comparison"]["metrics"]
    assert (accuracy["base_units"], accuracy["candidate_units"]) == (50, 51)
    assert accuracy["p_value"] < 1e-6
    assert latency["p_value"] > 0.01
    assert (report["status"], report["reason"][:23]) == ("promoted", "the candidate is better")
    with pytest.raises(UserError, match="no release 9"):
        made.commands.report(9)


def test_several_calls_of_a_run_are_one_run(made) -> None:
    release = made.commands.canary(3)
    for reward in (None, None, 1.0):
        made.answer(f"{release.number}/base", reward, task_id="t", run_id="0")
    made.answer(f"{release.number}/base", None, subject="ann")
    assert made.store.successes(release) == {"base": Successes(1, 1), "candidate": Successes(0, 0)}
    statements = list[str]()
    event.listen(made.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert decide(made.store, release) == "running"
    assert statements and not any("model_call" in each or "feedback" in each for each in statements)
    assert all("reward IS NOT NULL" in each for each in statements if "FROM calls" in each)


def test_a_run_counts_by_its_last_rated_call_and_each_choice_is_a_run(made) -> None:
    release = made.commands.ab_test(3)
    base, candidate = f"{release.number}/base", f"{release.number}/candidate"
    for reward in (0.0, None, 1.0):
        made.answer(candidate, reward, subject="ann", task_id="t", run_id="0")
    made.traffic.record(NewCall("m", choice, {}, 1, 10, 0.0, variant=base, subject="bob") for choice in (0, 1))
    for choice in (0, 1):
        made.traffic.give_feedback(NewFeedback(f"choice{choice}", ["m"], float(choice), choice=choice))
    assert made.store.successes(release) == {"base": Successes(1, 2), "candidate": Successes(1, 1)}
    outcomes = made.store.outcomes(release)
    assert {arm: outcomes[arm]["accuracy"] for arm in outcomes} == {"base": [0.5], "candidate": [1.0]}


def test_scores_are_compared(made) -> None:
    assert made.commands.compare(1, 3)["difference"] == {"reward": pytest.approx(0.2)}


def test_a_report_needs_a_release(made) -> None:
    with pytest.raises(UserError, match="no canary or A/B test yet"):
        made.commands.report()
