"""Routes of the web pages. If API keys are configured, the browser asks for a key as the password (HTTP Basic)."""

import asyncio
import base64
import binascii
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from rft_platform.cluster.local.supervisor import failing_servers
from rft_platform.experience.file_names import round_key
from rft_platform.online.gateway.proxy import LONGEST_NAME
from rft_platform.online.gateway.release_routes import ADMIN
from rft_platform.online.pages.history import INTERVALS, WINDOWS, history_charts, shortest_window
from rft_platform.online.pages.shell import html, static_routes
from rft_platform.online.releases.commands import ReleaseCommands
from rft_platform.online.traffic.alerts import Watch
from rft_platform.online.traffic.database import (
    COMMITTED,
    CONSUMED,
    LABELLED,
    RECORDED,
    STALE,
    UNTRAINABLE,
)
from rft_platform.online.traffic.history import Interval
from rft_platform.online.traffic.incoming import ANSWER, QUESTION, TOOL_INVALID, TOOL_VALID
from rft_platform.online.traffic.preferences import PreferenceStore
from rft_platform.online.traffic.reader import TrafficReader
from rft_platform.online.traffic.store import TrafficStore, many_stale
from rft_platform.online.traffic.writer import TrafficWriter
from rft_platform.openai_api.errors import ApiError
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import read
from rft_platform.rounds.releases.training_start import describe_start
from rft_platform.web_guard.checks import headers_of

LOG = logging.getLogger(__name__)
_PROGRESS_S = 3.0
_MOST_BYTES = 100_000
_NEWEST = 8  # the status page shows the versions that serve and this number of the newest versions
_ACTIONS = (
    (TOOL_VALID, "valid tool call"), (TOOL_INVALID, "invalid tool call"), (QUESTION, "question"), (ANSWER, "answer"),
)  # fmt: skip
_ROWS = (
    (RECORDED, "wait for feedback"), (LABELLED, "labelled"), (COMMITTED, "committed"), (CONSUMED, "consumed"),
    (STALE, "stale"), (UNTRAINABLE, "untrainable"),
)  # fmt: skip
_IF_ANY = (STALE, UNTRAINABLE)


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of the training as the status page shows it."""

    last_round: str
    waiting: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # why a server or the engine does not run


class ProjectProgress:
    """Computes the progress of a project; several threads may call it."""

    def __init__(
        self,
        project: Project,
        what_is_next: Callable[[Project], Sequence[str]],
        problems: Callable[[], Sequence[str | None]] = tuple,
    ) -> None:
        """``problems``: of the service's own threads; None for a thread without one."""
        self._project = project
        self._what_is_next = what_is_next
        self._own_problems = problems
        self._lock = threading.Lock()
        self._found: tuple[float, Progress] | None = None

    def __call__(self) -> Progress:
        """The progress, a few seconds old at most."""
        with self._lock:
            if self._found is None or time.monotonic() - self._found[0] > _PROGRESS_S:
                self._found = (time.monotonic(), self._compute())
            return replace(self._found[1], problems=tuple(self.problems()))

    def problems(self) -> list[str]:
        """Why a server of the project or the engine does not run, or new versions cannot be read."""
        return [*filter(None, self._own_problems()), *failing_servers(self._project.home.logs)]

    def _compute(self) -> Progress:
        try:
            lines = tuple(self._what_is_next(self._project))
        except Exception as error:
            LOG.warning("the plan of the project cannot be read: %s", error)
            lines = (f"the plan cannot be read: {error}",)
        return Progress(last_round(self._project), lines)


def last_round(project: Project) -> str:
    """The newest trained round in one line."""
    for number in reversed(project.store.rounds()):
        record = read(project.store, number)
        policy = record.published()
        if number == 0 or policy is None:
            continue
        reward = record.judged.mean_reward if record.judged else None
        details = "" if reward is None else f", mean reward {reward:.3f}"
        details += f", {describe_start(record.start)}" if record.start else ""
        return f"Last round: {round_key(number)} published version {policy.policy_version}{details}."
    return "No round has ended yet."


@dataclass(frozen=True, slots=True, kw_only=True)
class PageData:
    """Sources of the pages' data. ``progress`` may read files and is called in a thread; ``watch`` does no I/O."""

    project: str
    releases: ReleaseCommands
    preferences: PreferenceStore
    traffic: TrafficStore
    writer: TrafficWriter
    reader: TrafficReader
    tenant_of: Callable[[Mapping[str, str]], str]
    progress: Callable[[], Progress]
    watch: Callable[[], Watch] = Watch
    history: Callable[[float, float, int], Sequence[Interval]] = lambda since, until, intervals: ()
    first_call: Callable[[], float | None] = lambda: None


def page_routes(data: PageData) -> APIRouter:
    """The routes of both pages."""
    routes = APIRouter(include_in_schema=False)
    routes.include_router(static_routes())

    @routes.get("/")
    async def start() -> Response:
        return RedirectResponse("/status")

    @routes.get("/status")
    async def status(request: Request) -> Response:
        return await _for_admin(data, request, "status.html.jinja", lambda: _history(data, request))

    @routes.get("/status/live")
    async def live(request: Request) -> Response:
        return await _for_admin(data, request, "live.html.jinja")

    @routes.get("/status/history")
    async def history(request: Request) -> Response:
        return await _for_admin(data, request, "history.html.jinja", lambda: _history(data, request), live=False)

    @routes.get("/preferences")
    async def preferences(request: Request) -> Response:
        return await _pair(data, request, "preferences.html.jinja")

    @routes.get("/preferences/next")
    async def next_pair(request: Request) -> Response:
        return await _pair(data, request, "pair.html.jinja")

    @routes.post("/preferences")
    async def pick(request: Request) -> Response:
        tenant = _tenant(data, request)
        if tenant is None:
            return _sign_in()
        form = await _form(request)
        rater = form.get("rater", "")[:LONGEST_NAME] or tenant or None
        await data.writer.run(
            lambda _: data.preferences.pick(
                _number(form, "left"), _number(form, "right"), form.get("picked", ""),
                form.get("comment", "").strip()[:10_000], rater, tenant,
            )
        )  # fmt: skip
        return await _pair(data, request, "pair.html.jinja")

    @routes.get("/preferences/pairs.jsonl")
    async def pairs(request: Request) -> Response:
        tenant = _tenant(data, request)
        if tenant is None:
            return _sign_in()
        rows = await data.reader.run(lambda: data.preferences.pairs(tenant))
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return Response(lines, media_type="application/jsonl")

    return routes


async def _for_admin(
    data: PageData,
    request: Request,
    template: str,
    further: Callable[[], dict[str, Any]] = dict,
    live: bool = True,
) -> Response:
    """A page or a part of one with the values of ``further``, and unless ``live`` is false with the newest figures."""
    tenant = _tenant(data, request)
    if tenant not in ("", ADMIN):
        return _sign_in()
    progress = await asyncio.to_thread(data.progress) if live else None
    values = await data.reader.run(lambda: further() | ({} if progress is None else _status(data, progress)))
    return html(template, title="Status", project=data.project, **values)


def _history(data: PageData, request: Request) -> dict[str, Any]:
    now, chosen = time.time(), request.query_params.get("window")
    window = chosen or shortest_window(data.first_call(), now)
    if window not in WINDOWS:
        raise ApiError(400, f"window {window[:20]!r}: expected one of {', '.join(WINDOWS)}", "invalid_value")
    charts = history_charts(data.history(now - WINDOWS[window], now, INTERVALS), data.releases.status()["serving"])
    return {"window": window, "chosen": chosen, "windows": tuple(WINDOWS), "charts": charts}


async def _pair(data: PageData, request: Request, template: str) -> Response:
    tenant = _tenant(data, request)
    if tenant is None:
        return _sign_in()
    pair, decided = await data.reader.run(lambda: (data.preferences.next_pair(tenant), data.preferences.decided()))
    return html(template, title="Preferences", project=data.project, pair=pair, decided=decided)


def _status(data: PageData, progress: Progress) -> dict[str, Any]:
    store = data.traffic
    counts = store.counts()
    events = [
        {"at": time.strftime("%m-%d %H:%M:%S", time.gmtime(each.at)), "kind": each.kind.replace("_", " "),
         "reason": each.reason}
        for each in store.events(10)
    ]  # fmt: skip
    known = data.releases.status()
    earlier, newest = known["versions"][:-_NEWEST], known["versions"][-_NEWEST:]
    known["versions"] = [*(each for each in earlier if each["traffic"]), *newest]
    return {
        **known,
        "rows": [(name, counts[state]) for state, name in _ROWS if counts[state] or state not in _IF_ANY],
        "stale": many_stale(counts),
        "watch": data.watch(),
        "actions": _ACTIONS,
        "last_round": progress.last_round,
        "waiting": progress.waiting,
        "problems": progress.problems,
        "events": events,
    }


def _tenant(data: PageData, request: Request) -> str | None:
    """The tenant of a request by its bearer key or its Basic password; None if neither is a valid key."""
    headers = headers_of(request.scope)
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            _, _, password = base64.b64decode(given, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        headers = {**headers, "authorization": f"Bearer {password}"}
    try:
        return data.tenant_of(headers)
    except ApiError:
        return None


def _sign_in() -> Response:
    return Response("An API key is needed, as the password.", 401, {"www-authenticate": 'Basic realm="API key"'})


async def _form(request: Request) -> dict[str, str]:
    """The fields of a URL-encoded body. Raises ApiError (400) for NUL, which PostgreSQL does not store."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise ApiError(413, f"the form exceeds {_MOST_BYTES:,} bytes", "too_large")
    try:
        fields = parse_qs(body.decode(), max_num_fields=20)
    except ValueError:
        raise ApiError(400, "expected a URL-encoded form", "invalid_value") from None
    form = {name: values[-1] for name, values in fields.items()}
    if any("\0" in value for value in form.values()):
        raise ApiError(400, "a field of the form contains NUL: remove this character", "invalid_value")
    return form


def _number(form: Mapping[str, str], name: str) -> int:
    text = form.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ApiError(400, f"{name} {text[:20]!r}: expected the number of a call", "invalid_value")
    return int(text)
