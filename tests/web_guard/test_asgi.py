"""The middleware before an application: signing in, and what is refused without having reached the application."""

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from rft_platform.web_guard.asgi import WebGuard, set_cookie

TOKEN = "correct-horse-battery"
BEARER = {"authorization": f"Bearer {TOKEN}"}
JSON = {"content-type": "application/json"}


class Served:
    """A guarded application that notes which requests reach it."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        methods = ["GET", "POST", "DELETE"]
        routes = [Route("/{path:path}", self.http, methods=methods), WebSocketRoute("/graphql", self.websocket)]
        guard = WebGuard(Starlette(routes=routes), TOKEN, public={"/health"}, graphql="/graphql")
        self.client = TestClient(guard, base_url="http://127.0.0.1:3000", follow_redirects=False)

    async def http(self, request: Request) -> PlainTextResponse:
        self.reached.append(f"{request.method} {request.url.path}?{request.url.query}")
        return PlainTextResponse("served")

    async def websocket(self, websocket: WebSocket) -> None:
        self.reached.append("websocket")
        await websocket.accept()
        await websocket.close()


@pytest.fixture
def served() -> Served:
    return Served()


def test_nothing_is_served_without_the_token(served: Served) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"cookie": "rft_web=1"}, {"cookie": 'a="\x01'}):
        answer = served.client.get("/runs", headers=headers)
        assert answer.status_code == 401
        assert "web_token" in answer.json()["error"]
        assert served.client.post("/graphql", json={}, headers=headers).status_code == 401
    assert served.client.get("/?token=wrong").status_code == 401
    assert served.client.post(f"/graphql?token={TOKEN}", json={}).status_code == 401
    assert not served.reached
    assert served.client.get("/health").text == "served"
    assert served.client.post("/health").status_code == 401


def test_scripts_send_the_token_as_a_header(served: Served) -> None:
    assert served.client.post("/graphql", json={}, headers=BEARER).text == "served"


def test_the_link_is_exchanged_for_a_cookie(served: Served) -> None:
    answer = served.client.get(f"/runs/ab%20c?x=1&token={TOKEN}&y=2")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/runs/ab%20c?x=1&y=2"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert answer.headers["cache-control"] == "no-store"
    assert not served.reached
    page = served.client.get("/runs")  # the client keeps the cookie
    assert page.text == "served"
    assert page.headers["x-frame-options"] == "SAMEORIGIN"
    elsewhere = served.client.get(f"http://127.0.0.1:3000//evil.example/?token={TOKEN}")
    assert elsewhere.headers["location"] == "/evil.example/"


@pytest.mark.parametrize("foreign", ['prefs={"a": 1, "b": [2]}', "name=two words", "flag", 'a="\x01', "=", "a=b=c"])
def test_cookies_of_other_servers_do_not_hide_ours(served: Served, foreign: str) -> None:
    ours = set_cookie(TOKEN, secure=False).partition(";")[0]
    for cookie in (f"{foreign}; {ours}", f"{ours};{foreign}"):
        assert served.client.get("/", headers={"cookie": cookie}).text == "served"
    assert served.client.get("/", headers={"cookie": f"{foreign}; {ours}x"}).status_code == 401


def test_a_browser_without_the_cookie_gets_a_page_to_sign_in(served: Served) -> None:
    answer = served.client.get('/runs/"><script>', headers={"accept": "text/html,*/*"})
    assert answer.status_code == 401
    assert "<form" in answer.text
    assert "<script>" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example:3000"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "text/plain; application/json"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_requests_of_other_pages_are_refused_even_with_a_valid_token(
    served: Served, headers: dict[str, str], status: int
) -> None:
    answer = served.client.post("/graphql", content="{}", headers=JSON | BEARER | headers)
    assert answer.status_code == status
    assert not served.reached


def test_graphql_by_get_is_refused(served: Served) -> None:
    assert served.client.get("/graphql?query=mutation", headers=BEARER).status_code == 405
    assert served.client.get("/graphql/?query=mutation", headers=BEARER).status_code == 405
    assert not served.reached
    assert served.client.get("/graphql", headers=BEARER | {"accept": "text/html"}).text == "served"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "127.0.0.1:3000"},
        BEARER | {"host": "127.0.0.1:3000", "origin": "http://evil.example"},
        BEARER | {"host": "evil.example"},
    ],
)
def test_websockets_are_guarded_too(served: Served, headers: dict[str, Any]) -> None:
    with pytest.raises(WebSocketDisconnect), served.client.websocket_connect("/graphql", headers=headers):
        pass
    assert not served.reached
    with served.client.websocket_connect(
        "/graphql", headers=BEARER | {"host": "127.0.0.1:3000", "origin": "http://127.0.0.1:3000"}
    ):
        pass
    assert served.reached == ["websocket"]
