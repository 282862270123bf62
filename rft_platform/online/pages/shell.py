"""What all web pages of the platform share: style sheets and scripts, security headers, and templates."""

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from rft_platform.common.redaction import visible

_FOLDER = Path(__file__).parent
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
_FILES = {file.name: file for file in (_FOLDER / "static").iterdir() if file.suffix in _TYPES}
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"


def static_routes(*further: Path) -> APIRouter:
    """The route ``/static/NAME`` of the shared files and of the files in ``further`` folders."""
    files = _FILES | {file.name: file for folder in further for file in folder.iterdir() if file.suffix in _TYPES}
    routes = APIRouter(include_in_schema=False)

    @routes.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in files:
            return Response(f"no file {name[:100]!r}", 404, media_type="text/plain")
        headers = {"cache-control": "max-age=3600", "x-content-type-options": "nosniff"}
        return Response(_content(files[name]), media_type=_TYPES[files[name].suffix], headers=headers)

    return routes


def html(template: str, folder: Path = _FOLDER / "templates", **values: Any) -> HTMLResponse:
    """A page from a template of ``folder``. Values are escaped, and a missing one is an error."""
    headers = {"content-security-policy": _POLICY, "cache-control": "no-store", "x-content-type-options": "nosniff"}
    return HTMLResponse(_templates(folder).get_template(template).render(**values), headers=headers)


@cache
def _templates(folder: Path) -> jinja2.Environment:
    folders = [folder, _FOLDER / "templates"]  # pages of other folders extend the templates here
    loader = jinja2.FileSystemLoader(folders)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, finalize=_written_out)


def _written_out(value: Any) -> Any:
    """A text with its control characters written out: those that reorder it would show other text than there is."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


@cache
def _content(file: Path) -> bytes:
    return file.read_bytes()
