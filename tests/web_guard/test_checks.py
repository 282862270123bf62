"""Host, Origin and token checks of one request, and the token that a home keeps."""

import stat
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.web_guard.checks import Refused, bearer_token, check_host, check_origin, tokens_match
from rft_platform.web_guard.token import access_token

HOST = {"host": "127.0.0.1:3000"}


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:3000", "localhost:8888", "LOCALHOST", "[::1]:3000", "rft.example"]
)
def test_loopback_and_configured_hosts_pass(host: str) -> None:
    check_host({"host": host}, {"rft.example"})


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:3000", "evil@127.0.0.1", "127.0.0.1:x",
     "127.0.0.1/x", "127.0.0.1, evil.example", "[::1", "0.0.0.0:3000", "10.0.0.1"],
)  # fmt: skip
def test_other_hosts_are_refused(host: str) -> None:
    with pytest.raises(Refused) as refused:
        check_host({"host": host}, {"rft.example"})
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {}),  # no browser
        ("POST", {"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-origin"}),
        ("POST", {"origin": "https://rft.example", "sec-fetch-site": "same-origin"}),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}),
        ("WEBSOCKET", {"origin": "http://127.0.0.1:3000"}),
    ],
)
def test_own_pages_links_and_scripts_pass(method: str, headers: dict[str, str]) -> None:
    check_origin(method, HOST | headers, {"rft.example"})


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}),
        ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}),
        ("POST", {"origin": "http://127.0.0.1:8080"}),  # another user's server: same site, not same origin
        ("POST", {"origin": "http://evil.example"}),
        ("POST", {"origin": "null"}),
        ("POST", {"origin": "http://127.0.0.1:3000.evil.example"}),
        ("WEBSOCKET", {"origin": "http://evil.example"}),
    ],
)
def test_requests_of_other_origins_are_refused(method: str, headers: dict[str, str]) -> None:
    with pytest.raises(Refused):
        check_origin(method, HOST | headers, {"rft.example"})


def test_tokens() -> None:
    assert bearer_token({"authorization": "Bearer abc"}) == "abc"
    assert bearer_token({"authorization": "Basic abc"}) is None
    assert bearer_token({}) is None
    assert tokens_match("ä" * 20, "ä" * 20)
    for given, expected in [(None, "abc"), ("", ""), ("abd", "abc"), ("abc", "")]:
        assert not tokens_match(given, expected)


def test_a_home_keeps_its_token_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RFT_WEB_TOKEN", raising=False)
    file = tmp_path / "home" / "web_token"
    token = access_token(file)
    assert len(token) >= 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert access_token(file) == token
    file.write_text("short\n")
    assert access_token(file) not in (token, "short")
    monkeypatch.setenv("RFT_WEB_TOKEN", "0123456789abcdef")
    assert access_token(file) == "0123456789abcdef"
    monkeypatch.setenv("RFT_WEB_TOKEN", "secret")
    with pytest.raises(UserError, match="RFT_WEB_TOKEN is not usable") as error:
        access_token(file)
    assert "secret" not in str(error.value)
