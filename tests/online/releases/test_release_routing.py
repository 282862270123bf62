"""Routes of requests: by share, by header, and what counts."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from rft_platform.online.gateway.proxy import names_of
from rft_platform.online.gateway.request_bodies import FeedbackRequest
from rft_platform.online.releases.routing import Router, ServedRelease, Split
from rft_platform.web_guard.checks import headers_of

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


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_header_names_the_same_subject_as_the_body(encoding: str) -> None:
    headers = headers_of({"headers": [(b"x-rft-subject", "Jörg".encode(encoding))]})
    assert names_of(headers, {}) == names_of({}, {"user": "Jörg"}) == {"subject": "Jörg"}


def test_an_api_key_is_never_taken_as_the_name_of_a_run() -> None:
    headers = {"authorization": "Bearer Qx7/9aZkL2/8sTuVw"}
    assert names_of(headers, {}) == {"task_id": "Qx7/9aZkL2", "run_id": "8sTuVw"}
    assert names_of(headers, {}, record_keys=False) == {}


@pytest.mark.parametrize("given", [{"metrics": {"x": float("nan")}}, {"user_feedback": {"rating": float("inf")}}])
def test_ratings_and_metrics_are_finite(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        FeedbackRequest.model_validate({"msg_ids": ["a"], "reward": 1.0, **given})
