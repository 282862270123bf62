"""The exporter's HTTP server: ``/metrics`` for Prometheus, ``/healthz`` for health checks."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rft_platform.config.home import Home
from rft_platform.inference.serving.http_server import serve
from rft_platform.servers.metrics.prometheus_collector import PlatformCollector
from rft_platform.web_guard.asgi import WebGuard

_HEALTH = "/healthz"
_GRACE_S = 1


def metrics_app(home: Home, token: str | None) -> ASGIApp:
    """An ASGI application with the paths ``/metrics`` and ``/healthz``; ``/healthz`` does not read the project.

    ``/metrics`` requires ``token``, as a header or as the cookie of the project's other servers; None: no token needed.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PlatformCollector(home))

    def metrics(request: Request) -> Response:  # in a thread: a slow scrape does not block others
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": media_type})

    def health(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    app = Starlette(routes=[Route("/metrics", metrics), Route(_HEALTH, health)])
    return app if token is None else WebGuard(app, token, public={_HEALTH})


def serve_metrics(home: Home, host: str, port: int, token: str | None, listening: Callable[[], None]) -> None:
    """Serve until interrupted. If ``token`` is None, everybody who can reach the port can read the metrics.

    ``listening`` is called when the port takes connections. Raises OSError if the port cannot be used.
    """
    serve(metrics_app(home, token), host, port, _GRACE_S, listening)
