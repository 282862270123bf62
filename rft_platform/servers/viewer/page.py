"""What the pages of `rft view` share: their navigation, and the fields of their forms."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fastapi.responses import Response

from rft_platform.common.errors import UserError
from rft_platform.online.pages.shell import html
from rft_platform.rounds.project.project import Project

FOLDER = Path(__file__).parent
PAGE_ROWS = 50
_MOST_PAGES = 10**9  # a database counts the rows before a page in 64 bits
_PAGES = (("/", "Overview"), ("/runs", "Runs"))
_PRODUCTION = ("/production", "Production")
T = TypeVar("T")


def page(template: str, project: Project, **values: Any) -> Response:
    """A page of the project."""
    shared = {
        "project": project.config.name,
        "pages": _PAGES if project.traffic is None else (*_PAGES, _PRODUCTION),
        "reward_style": reward_style,
    }
    return html(template, FOLDER / "templates", **shared, **values)


def reward_style(reward: float | None) -> str:
    """The class of a reward's colour: from red at 0 or less to green at 1 or more."""
    if reward is None:
        return "unrewarded"
    return "reward-0" if reward <= 0 else "reward-4" if reward >= 1 else f"reward-{1 + int(reward * 3)}"


def page_number(given: Mapping[str, str]) -> int:
    """The number of the page that a form asks for, from 0. Raises UserError for a value that is no number."""
    return min(max(field(given, "page", int) or 0, 0), _MOST_PAGES)


def field(given: Mapping[str, str], name: str, kind: Callable[[str], T], what: str = "a number") -> T | None:
    """The value of a form's field, None if it is empty. Raises UserError for a value that is not ``what``."""
    text = given.get(name, "").strip()
    try:
        return kind(text) if text else None
    except ValueError as error:
        raise UserError(f"{name} {text[:40]!r}: expected {what}") from error
