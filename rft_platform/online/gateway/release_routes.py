"""HTTP routes of releases: the functions of ``releases.commands`` below ``/releases``.

If API keys are configured, only the tenant ``admin`` may use these routes, because they affect all tenants.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import ConfigDict, Field

from rft_platform.online.gateway.request_bodies import StorableBody
from rft_platform.online.releases.commands import ReleaseCommands
from rft_platform.online.releases.routing import Sticky
from rft_platform.online.releases.rules import ab_rule, canary_rule
from rft_platform.online.traffic.reader import TrafficReader
from rft_platform.online.traffic.writer import TrafficWriter
from rft_platform.openai_api.errors import ApiError
from rft_platform.web_guard.checks import headers_of

ADMIN = "admin"  #: the tenant that decides on versions


_Run = Callable[[Callable[[], Any]], Awaitable[Any]]  # calls a function in a thread that uses the database


class _Body(StorableBody):
    """The body of a request about a version."""

    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(default=None, ge=0, lt=2**31)
    reason: str = Field(default="over HTTP", max_length=1000)


class _Canary(_Body):
    """The body of a request that starts a canary release."""

    share: float = Field(default=0.1, gt=0, lt=1)
    sticky: Sticky = "conversation"
    least_runs: int = Field(default=100, ge=1, lt=2**31)
    looks: int = Field(default=4, ge=1, le=20)
    margin: float = Field(default=0.05, ge=0, lt=1)


class _ABTest(_Body):
    """The body of a request that starts an A/B test."""

    share: float = Field(default=0.5, gt=0, lt=1)
    sticky: Sticky = "user"
    units: int = Field(default=200, ge=30, lt=2**31)
    alpha: float = Field(default=0.05, gt=0, lt=1)


def release_routes(
    commands: ReleaseCommands,
    writer: TrafficWriter,
    reader: TrafficReader,
    tenant_of: Callable[[Mapping[str, str]], str],
) -> APIRouter:
    """Build the routes. ``tenant_of`` returns the tenant of a request's headers; "" if no keys are configured."""

    def check_admin(request: Request) -> None:
        if tenant_of(headers_of(request.scope)) not in ("", ADMIN):
            raise ApiError(403, f"only the tenant {ADMIN} decides on versions", "permission_denied")

    routes = APIRouter(prefix="/releases", dependencies=[Depends(check_admin)])

    async def run(work: Callable[[], Any]) -> Any:
        """Call ``work`` in the thread that writes to the database."""
        return await writer.run(lambda _: work())

    _add_reports(routes, commands, reader.run)
    _add_decisions(routes, commands, run, writer)
    return routes


def _add_reports(routes: APIRouter, commands: ReleaseCommands, run: _Run) -> None:
    @routes.get("")
    async def status() -> dict[str, Any]:
        """All versions, the version that serves, and the running release."""
        return dict(await run(lambda: commands.status()))

    @routes.get("/report")
    async def report(number: int | None = None) -> dict[str, Any]:
        """A release, by default the newest, with the comparison of its versions."""
        return dict(await run(lambda: commands.report(number)))

    @routes.get("/compare")
    async def compare(one: int, other: int) -> dict[str, Any]:
        """Scores of two versions on held-out tasks."""
        return dict(await run(lambda: commands.compare(one, other)))


def _add_decisions(routes: APIRouter, commands: ReleaseCommands, run: _Run, writer: TrafficWriter) -> None:
    @routes.post("/promote")
    async def promote(given: _Body) -> dict[str, Any]:
        """Serve one version from now on. Without a version the service follows the newest released one."""
        return {"status": "success", "version": await run(lambda: commands.promote(given.version, given.reason))}

    @routes.post("/rollback")
    async def roll_back(given: _Body) -> dict[str, Any]:
        """Serve another released version; if none is named, the previous one."""
        return {"status": "success", "version": await run(lambda: commands.roll_back(given.version, given.reason))}

    @routes.post("/resume")
    async def resume(given: _Body) -> dict[str, Any]:
        """Continue a training that alerts have paused."""
        alerts = await writer.run(lambda store: store.resume_training(given.reason))
        return {"status": "success", "alerts": alerts}

    @routes.post("/canary")
    async def canary(given: _Canary) -> dict[str, Any]:
        """Start a canary."""
        rule = canary_rule(given.least_runs, given.looks, margin=given.margin)
        release = await run(
            lambda: commands.canary(
                given.version, share=given.share, sticky=given.sticky, rule=rule, reason=given.reason
            )
        )
        return dict(release.to_json())

    @routes.post("/ab")
    async def ab_test(given: _ABTest) -> dict[str, Any]:
        """Start an A/B test."""
        rule = ab_rule(given.units, given.alpha)
        release = await run(
            lambda: commands.ab_test(
                given.version, share=given.share, sticky=given.sticky, rule=rule, reason=given.reason
            )
        )
        return dict(release.to_json())
