"""The pages of `rft view`, and their server behind the web guard.

A transcript shows token ids as pieces of text with a colour: by log-prob, by the advantage of their row, or by the loss
mask.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from rft_platform.common.errors import RftError, UserError
from rft_platform.config.home import Home
from rft_platform.inference.serving.http_server import serve
from rft_platform.object_store.mirror import fetch_missing
from rft_platform.online.pages.shell import static_routes
from rft_platform.online.project import open_project
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import published
from rft_platform.servers.ui_servers import interface_links
from rft_platform.servers.viewer import overview
from rft_platform.servers.viewer.page import FOLDER, field, page, page_number
from rft_platform.servers.viewer.production import production_dataset, production_page
from rft_platform.servers.viewer.queries import (
    Search,
    find_runs,
    newest,
    rounds_to_compare,
    rows_of_run,
    runs_of_task,
    versions_of_task,
)
from rft_platform.web_guard.asgi import WebGuard

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Colour = Literal["logprob", "advantage", "mask"]
COLOURS: tuple[Colour, ...] = ("logprob", "advantage", "mask")
_GRACE_S = 2
_INCOMPLETE = "\ufffd"  # what tokenizers decode the first bytes of a character to
_MOST_PARTS = 4  # bytes of a character, and so its tokens
#: Least log-prob of each class, from likely to unlikely: probabilities of about 90, 50, 14 and 1.8 %.
_LIKELY = ((-0.105, "p0"), (-0.69, "p1"), (-2.0, "p2"), (-4.0, "p3"), (-math.inf, "p4"))


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, its style class, and what is shown when the pointer is on it."""

    text: str
    style: str
    title: str


def pieces(row: Mapping[str, Any], tokenizer: "Tokenizer | None", colour: Colour) -> list[Piece]:
    """The tokens of a row's response. Without a tokenizer their text is the id."""
    advantage, ids = row["advantage"], row["response_ids"]
    texts = [str(token) for token in ids] if tokenizer is None else token_texts(ids, tokenizer)
    found = []
    for token, text, logprob, trained in zip(ids, texts, row["rollout_logprobs"], row["loss_mask"], strict=True):
        title = (
            f"token {token}, log-prob {logprob:.3f}, p {math.exp(logprob):.1%}, {'trained' if trained else 'masked'}"
        )
        found.append(Piece(text or "∅", _style(colour, logprob, advantage, trained), title))
    return found


def token_texts(ids: Sequence[int], tokenizer: "Tokenizer") -> list[str]:
    """The text that each token adds to those before it; that of a character of several tokens is with its last one.

    A token alone may have another text: SentencePiece drops the space before the first word. So each token is decoded
    behind the tokens that had the text before it, and only those.
    """
    texts, first, read = list[str](), 0, 0  # ids[first:read] had the text before, ids[read:] have none yet
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[first:read], skip_special_tokens=False)
        whole = tokenizer.decode(ids[first:end], skip_special_tokens=False)
        if whole.endswith(_INCOMPLETE) and end < len(ids) and end - read < _MOST_PARTS:
            texts.append("")
        else:
            texts.append(whole[len(before) :])
            first, read = read, end
    return texts


def _style(colour: Colour, logprob: float, advantage: float | None, trained: bool) -> str:
    if colour == "mask":
        return "trained" if trained else "masked"
    if colour == "advantage":
        if not trained or not advantage:
            return "masked" if not trained else "zero"
        size = "2" if abs(advantage) > 1 else "1"
        return f"{'up' if advantage > 0 else 'down'}{size}"
    return next(style for least, style in _LIKELY if logprob >= least)


def tokenizer_in(folder: Path) -> "Tokenizer | None":
    """The tokenizer of a model's folder, fetched from the home's copy; None if there is no ``tokenizer.json``."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        fetch_missing(file)
    return _tokenizer(file) if file.is_file() else None


@lru_cache(maxsize=4)
def _tokenizer(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def new_messages(
    earlier: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages after those that an earlier call already had; all if the agent changed its history.

    A key without a value (``content`` of a message with tool calls) is no change: clients leave it out.
    """
    known = len(earlier) if _without_none(messages[: len(earlier)]) == _without_none(earlier) else 0
    return list(messages[known:])


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value


class NotFoundError(UserError):
    """A page about something that the store does not have."""


def view_app(home: Home) -> FastAPI:
    """The application; unguarded, see ``serve_view``. The project is read again for every page."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(static_routes(FOLDER / "static"))

    @app.exception_handler(RftError)
    async def refused(request: Request, error: RftError) -> Response:
        status = 404 if isinstance(error, NotFoundError) else 400 if isinstance(error, UserError) else 500
        return PlainTextResponse(str(error), status)

    @app.get("/")
    async def front(request: Request, rounds: str = "") -> Response:
        host = request.url.hostname or "127.0.0.1"
        return await asyncio.to_thread(overview_page, home, host, every=rounds == "all")

    @app.get("/runs")
    async def runs(request: Request) -> Response:
        return await asyncio.to_thread(_runs_page, home, dict(request.query_params))

    @app.get("/runs/{number}/{run_id:path}")
    async def run(number: int, run_id: str, colour: str = "logprob") -> Response:
        return await asyncio.to_thread(_run_page, home, number, run_id, colour)

    @app.get("/tasks/{task_id:path}")
    async def task(task_id: str, rounds: str = "", one: int | None = None, other: int | None = None) -> Response:
        return await asyncio.to_thread(_task_page, home, task_id, rounds, one, other)

    @app.get("/production")
    async def production(request: Request) -> Response:
        return await asyncio.to_thread(production_page, home, dict(request.query_params))

    @app.get("/production/dataset.jsonl")
    async def dataset(request: Request) -> Response:
        return await asyncio.to_thread(production_dataset, home, dict(request.query_params))

    return app


def serve_view(home: Home, host: str, port: int, token: str, listening: Callable[[], None]) -> None:
    """Serve until interrupted; every request needs ``token``, as the header or as the cookie of the printed link.

    ``listening`` is called when the port takes connections.
    """
    with suppress(RftError):  # its reader sees the error
        overview_page(home, host)  # reads records and loads libraries and templates, so that the first page is fast
    serve(WebGuard(view_app(home), token), host, port, _GRACE_S, listening)


def overview_page(home: Home, host: str, *, every: bool = False) -> Response:
    """The first page, for a browser that reached this server as ``host``; ``every``: of all rounds, not the newest."""
    project = open_project(home)
    store, known = project.store, project.store.rounds()
    shown = overview.summaries(store, known if every else known[-overview.SHOWN_ROUNDS :])
    judged = next((each.number for each in reversed(shown) if each.judged), None)
    rewards, unrewarded = (None, 0) if judged is None else overview.histogram(store, judged)
    stages, times = overview.stages(shown)
    return page(
        "overview.html.jinja", project, title="Overview", shown=shown, earlier=len(known) - len(shown),
        newest=next((each.point for each in reversed(shown) if each.point is not None), None),
        measured=next((each for each in reversed(shown) if each.point and each.point.sampled is not None), None),
        curve=overview.learning_curve(shown), reward_curve=overview.reward_curve(shown),
        judged=judged, rewards=rewards, unrewarded=unrewarded, stages=stages, times=times,
        groups=[] if judged is None else overview.groups(store, judged),
        links=interface_links(home, host),
    )  # fmt: skip


def _runs_page(home: Home, given: dict[str, str]) -> Response:
    project, search = open_project(home), _search(given)
    found = find_runs(project.store, search)
    kept = {name: value for name, value in given.items() if value and name != "page"}
    return page(
        "runs.html.jinja", project, title="Runs", search=search, given=kept, found=found,
        compared=rounds_to_compare(project.store, found.rounds), retired=_retired(project, found.rounds),
        tasksets=sorted(project.tasksets), policies=sorted(project.policies),
    )  # fmt: skip


def _retired(project: Project, rounds: Sequence[int]) -> list[str]:
    """A sentence for each of the rounds whose rows were retired."""
    found = {number: project.store.ledger(number).read().retirement(project.store.home) for number in rounds}
    return [f"Round {number}: {text}." for number, text in found.items() if text]


def _run_page(home: Home, number: int, run_id: str, colour: str) -> Response:
    project = open_project(home)
    if colour not in COLOURS:
        raise UserError(f"colour {colour!r}: expected one of {', '.join(COLOURS)}")
    rows = rows_of_run(project.store, number, run_id)
    if not rows:
        raise NotFoundError(f"round {number} has no run {run_id!r}")
    return page(
        "run.html.jinja", project, title=f"Run {run_id}", run=rows[-1], calls=_calls(project, rows, colour),
        colour=colour, colours=COLOURS, compared=rounds_to_compare(project.store, [number]),
    )  # fmt: skip


def _task_page(home: Home, task_id: str, rounds: str, one: int | None, other: int | None) -> Response:
    """The runs of a task under two policy versions side by side; by default the oldest and the newest version."""
    project = open_project(home)
    first, _, last = rounds.partition("-")
    chosen = _search({"first": first, "last": last or first}).rounds(project.store) if rounds else newest(project.store)
    versions = versions_of_task(project.store, task_id, chosen)
    if not versions:
        raise NotFoundError(
            f"no run of task {task_id!r} in the rounds {rounds or f'{min(chosen, default=0)}-{max(chosen, default=0)}'}"
        )
    wanted = (versions[0] if one is None else one, versions[-1] if other is None else other)
    sides = [(version, runs_of_task(project.store, task_id, chosen, version)) for version in wanted]
    return page(
        "task.html.jinja", project, title="Task", task_id=task_id, rounds=rounds, versions=versions, sides=sides,
    )  # fmt: skip


def _calls(project: Project, rows: list[dict[str, Any]], colour: Colour) -> list[dict[str, Any]]:
    """The calls of a run: the messages that are new in each, and the tokens of its answer."""
    starts = {name: published(project.store, 0, name) for name in {row["policy"] for row in rows}}
    tokenizers = {name: tokenizer_in(Path(start.folder)) for name, start in starts.items() if start is not None}
    calls, earlier = [], list[Any]()
    for row in rows:
        shown = pieces(row, tokenizers.get(row["policy"]), colour)
        calls.append({**row, "new": new_messages(earlier, row["messages"]), "pieces": shown})
        earlier = [*row["messages"], row["response"]]
    return calls


def _search(given: dict[str, str]) -> Search:
    """The search of a form's fields; empty fields do not count. Raises UserError for a field of another form."""
    return Search(
        field(given, "first", int), field(given, "last", int), given.get("text", "").strip(),
        given.get("task", "").strip(), given.get("taskset", ""), given.get("policy", ""), field(given, "version", int),
        field(given, "least", float), field(given, "most", float), given.get("order", "newest"),
        page_number(given),
    )  # fmt: skip
