"""The links that commands print: with the access token only where the user alone reads them."""

import sys
from pathlib import Path

import pytest

from rft_platform.observability.masked_output import masked
from rft_platform.run.console import print_links
from rft_platform.web_guard.asgi import sign_in_url
from rft_platform.web_guard.token import access_token

PAGE = "/assets/evaluation_report"
SERVICE = "http://127.0.0.1:8010/v1?a=***"


@pytest.mark.parametrize(
    ("terminal", "given", "token_line"),
    [
        (True, False, None),
        (False, False, "token      in {file}"),
        (True, True, "token      the value of RFT_WEB_TOKEN"),
        (False, True, "token      the value of RFT_WEB_TOKEN"),
    ],
)
def test_links_have_the_token_on_a_terminal_only_and_not_that_of_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    terminal: bool, given: bool, token_line: str | None,
) -> None:  # fmt: skip
    monkeypatch.setenv("RFT_WEB_TOKEN", "given-by-the-environment" if given else "")
    token = access_token(file := tmp_path / "web_token")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", masked(sys.stdout))
    url = "http://127.0.0.1:5000"
    links = [("MLflow", sign_in_url(url, token) + "#/runs/1"), ("  results", sign_in_url(url, token, PAGE))]
    print_links([*links, ("service", SERVICE)], file)
    query = f"?token={token}" if token_line is None else ""
    expected = [f"MLflow     {url}/{query}#/runs/1", f"  results  {url}{PAGE}{query}", f"service    {SERVICE}"]
    printed = capsys.readouterr().out
    assert printed.splitlines() == [*expected, *([] if token_line is None else [token_line.format(file=file)])]


def test_addresses_without_a_token_say_nothing_of_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    print_links([("service", SERVICE)], tmp_path / "web_token")
    assert capsys.readouterr().out == f"service    {SERVICE}\n"
