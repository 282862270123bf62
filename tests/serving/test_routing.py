"""Routes of requests: by share, by header, and what counts."""

from types import SimpleNamespace
from typing import Any

from rft_platform.serving.releases.assignment import Split
from rft_platform.serving.routing import Router, ServedRelease

BASE: Any = SimpleNamespace(name="base")
OTHER: Any = SimpleNamespace(name="candidate")


def router(kind: Any = "canary", share: float = 0.5) -> Router:
    made = Router(BASE)
    made.begin(ServedRelease(7, kind, Split(share, "user", 7), OTHER))
    return made


def test_without_a_release_the_base_answers() -> None:
    route = Router(BASE).route({"x-rft-arm": "candidate"}, {}, "r")
    assert (route.engine, route.variant) == (BASE, None)


def test_users_keep_their_version() -> None:
    made = router()
    first = {user: made.route({}, {"subject": user}, "a") for user in map(str, range(200))}
    assert {made.route({}, {"subject": user}, "b").arm for user, route in first.items() if route.arm == "base"} == {
        "base"
    }
    assert 60 < sum(route.engine is OTHER for route in first.values()) < 140
    assert {route.variant for route in first.values()} == {"7/base", "7/candidate"}


def test_a_header_chooses_and_counts_in_canaries_only() -> None:
    for kind, variant in (("canary", "7/candidate"), ("ab", None)):
        route = router(kind, 0.01).route({"x-rft-arm": "candidate"}, {"subject": "1"}, "r")
        assert (route.engine, route.variant) == (OTHER, variant)


def test_failures_count_per_release() -> None:
    made = router()
    made.candidate_failures = 3
    same = made.release
    made.release = None
    made.begin(same)
    assert made.candidate_failures == 3
    made.begin(ServedRelease(8, "ab", Split(0.5, "user", 8), OTHER))
    assert made.candidate_failures == 0
