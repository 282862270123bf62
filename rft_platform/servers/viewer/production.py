"""The page of production calls: find them by their feedback, version, state, API key and time, and save them."""

import json
from datetime import UTC, datetime
from typing import Any

from fastapi.responses import Response

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.online.project import open_project
from rft_platform.online.traffic.browsing import CallSearch, dataset_rows, find_calls, known_metrics, usage_by_key
from rft_platform.online.traffic.database import STATES
from rft_platform.online.traffic.declared_metrics import REWARD
from rft_platform.online.traffic.project_traffic import traffic_database
from rft_platform.rounds.project.project import Project
from rft_platform.servers.viewer.page import PAGE_ROWS, field, page, page_number

_DAY_S = 86_400.0


def production_page(home: Home, given: dict[str, str]) -> Response:
    """One page of the calls that a form's fields describe; without a time those of the last day."""
    project = _online_project(home)
    engine, search, number = traffic_database(project), call_search(given), page_number(given)
    found = find_calls(engine, search, PAGE_ROWS + 1, number * PAGE_ROWS)
    kept = {name: value for name, value in given.items() if value and name != "page"}
    return page(
        "production.html.jinja", project, title="Production", search=search, given=kept, number=number,
        metrics=known_metrics(engine), states=STATES, usage=usage_by_key(engine, search), more=len(found) > PAGE_ROWS,
        price=project.config.service.token_price, calls=[_shown(call) for call in found[:PAGE_ROWS]],
    )  # fmt: skip


def production_dataset(home: Home, given: dict[str, str]) -> Response:
    """The calls that a form's fields describe as JSON Lines, to be trained on by ``algorithm_type: sft``."""
    engine = traffic_database(_online_project(home))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in dataset_rows(engine, call_search(given)))
    headers = {"content-disposition": 'attachment; filename="production.jsonl"', "cache-control": "no-store"}
    return Response(lines, media_type="application/jsonl", headers=headers)


def call_search(given: dict[str, str]) -> CallSearch:
    """The search of a form's fields. Raises UserError for a value that is not valid."""
    since, until = (field(given, name, _seconds, "a time as in 2026-01-31T08:00 (UTC)") for name in ("since", "until"))
    if since is None and until is None:
        since = datetime.now(UTC).timestamp() - _DAY_S
    key = given.get("key", "")
    return CallSearch(
        given.get("metric", "") or REWARD, field(given, "least", float), field(given, "most", float),
        given.get("tag", "").strip(), field(given, "version", _version), given.get("state", ""), key or None,
        since, until,
    )  # fmt: skip


def _version(text: str) -> int:
    """A policy version, limited to 64 bits, which a database takes; no version is that large."""
    return min(max(int(text), -1), 2**63 - 1)


def _seconds(text: str) -> float:
    """Seconds since the epoch; a time without an offset is in UTC."""
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _online_project(home: Home) -> Project:
    project = open_project(home)
    if project.traffic is None:
        raise UserError(f"{project.config.name} is no online project: it has no production traffic (docs/online.md)")
    return project


def _shown(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its time, its prompt and its answer as texts."""
    recorded = call["model_call"]
    asked = [each.get("content") for each in recorded.get("messages") or [] if each.get("role") == "user"]
    answer = recorded.get("response") or {}
    return {
        **call,
        "time": datetime.fromtimestamp(call["recorded_at"], UTC).strftime("%m-%d %H:%M:%S"),
        "prompt": asked[-1] if asked and isinstance(asked[-1], str) else "",
        "answer": answer.get("content") or (json.dumps(answer["tool_calls"]) if answer.get("tool_calls") else ""),
    }
