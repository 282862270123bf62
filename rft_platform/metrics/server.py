"""The exporter's HTTP server: ``/metrics`` for Prometheus, ``/healthz`` for whoever keeps it running."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from rft_platform.config.home import Home
from rft_platform.metrics.collector import PlatformCollector

_Answer = Callable[..., Any]
_POLL_S = 0.2


def metrics_app(home: Home) -> Callable[[dict[str, Any], _Answer], Iterable[bytes]]:
    """A WSGI application; anything but its two paths is answered 404. ``/healthz`` reads nothing of the project."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PlatformCollector(home))
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: _Answer) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return list(metrics(environ, start_response))
        known = environ["PATH_INFO"] == "/healthz"
        start_response("200 OK" if known else "404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"ok\n" if known else b"see /metrics and /healthz\n"]

    return app


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """A line a scrape would be all that the log holds."""


def serve_metrics(home: Home, host: str, port: int) -> None:
    """Serve until interrupted."""
    with make_server(host, port, metrics_app(home), _Server, _Quiet) as server:
        server.serve_forever(_POLL_S)


@contextmanager
def serving_metrics(home: Home) -> Iterator[str]:
    """Serve on a free loopback port for the length of the block; gives the address."""
    with make_server("127.0.0.1", 0, metrics_app(home), _Server, _Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
