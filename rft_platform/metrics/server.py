"""The exporter's HTTP server: ``/metrics`` for Prometheus, ``/healthz`` for health checks."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from rft_platform.config.home import Home
from rft_platform.metrics.prometheus_collector import PlatformCollector
from rft_platform.web_guard.checks import (
    Refused,
    bearer_token,
    check_host,
    check_origin,
    configured_hosts,
    tokens_match,
)
from rft_platform.web_guard.sign_in import cookie_is_valid

_Answer = Callable[..., Any]
_POLL_S = 0.2


def metrics_app(home: Home, token: str | None) -> Callable[[dict[str, Any], _Answer], Iterable[bytes]]:
    """A WSGI application with the paths ``/metrics`` and ``/healthz``; ``/healthz`` does not read the project.

    ``/metrics`` requires ``token``, as a header or as the cookie of the project's other servers; None: no token needed.
    """
    hosts = configured_hosts()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PlatformCollector(home))
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: _Answer) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            try:
                if token is not None:
                    _authorise(environ, token, hosts)
            except Refused as refusal:
                return _refuse(refusal, start_response)
            return list(metrics(environ, start_response))
        known = environ["PATH_INFO"] == "/healthz"
        start_response("200 OK" if known else "404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"ok\n" if known else b"see /metrics and /healthz\n"]

    return app


def _authorise(environ: dict[str, Any], token: str, hosts: frozenset[str]) -> None:
    """Raise Refused for a foreign Host or origin, or if the token is missing."""
    headers = {
        name.removeprefix("HTTP_").lower().replace("_", "-"): str(value)
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    check_host(headers, hosts)
    check_origin(environ["REQUEST_METHOD"], headers, hosts)
    if not (tokens_match(bearer_token(headers), token) or cookie_is_valid(headers, token)):
        raise Refused(401, "an access token is needed: send `Authorization: Bearer` with RFT_HOME/web_token")


def _refuse(refusal: Refused, start_response: _Answer) -> Iterable[bytes]:
    status = HTTPStatus(refusal.status)
    start_response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{refusal}\n".encode()]


class _Server(ThreadingMixIn, WSGIServer):
    """A server with one thread per request, so that a slow scrape does not block others."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    """A request handler without log lines."""

    def log_message(self, *_: object) -> None:
        """Log nothing: one line per scrape would flood the log."""


def serve_metrics(home: Home, host: str, port: int, token: str | None) -> None:
    """Serve until interrupted. If ``token`` is None, everybody who can reach the port can read the metrics."""
    with make_server(host, port, metrics_app(home, token), _Server, _Quiet) as server:
        server.serve_forever(_POLL_S)


@contextmanager
def serving_metrics(home: Home, token: str | None = None) -> Iterator[str]:
    """Serve on a free loopback port during the block; yields the address."""
    with make_server("127.0.0.1", 0, metrics_app(home, token), _Server, _Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
