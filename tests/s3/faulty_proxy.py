"""A proxy in front of an S3 server that breaks requests: errors, delays, truncated answers, lost answers; seeded."""

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}


class FaultyProxy:
    """Passes requests on to ``endpoint``. ``rates`` gives the probability of each kind of fault.

    ``latency_s`` is added to every request. ``traffic`` counts the requests of each method, and the bytes of both ways.
    """

    def __init__(self, endpoint: str, seed: int, *, latency_s: float = 0.0, **rates: float) -> None:
        self.injected: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()
        self._latency_s = latency_s
        self._address = urlsplit(endpoint).netloc
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._rates = rates

    def set_rates(self, **rates: float) -> None:
        """Replace the probabilities of the faults of later requests."""
        with self._lock:
            self._rates = rates

    def fault(self) -> str | None:
        """The fault of the next request, if any."""
        with self._lock:
            drawn = self._random.random()
            for kind, rate in self._rates.items():
                if (drawn := drawn - rate) < 0:
                    self.injected[kind] += 1
                    return kind
        return None

    def delay(self) -> None:
        """Wait as a request to a distant store does."""
        time.sleep(self._latency_s)

    def count(self, method: str, sent: int, received: int) -> None:
        """Add a request with the bytes that the client sent and received."""
        with self._lock:
            self.traffic.update({method: 1, "bytes_sent": sent, "bytes_received": received})

    @contextmanager
    def running(self) -> Iterator[str]:
        """The URL of the proxy."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, self._address))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _handler(proxy: FaultyProxy, address: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body, fault = self._body(), proxy.fault()
            if fault in ("500", "503"):
                self._answer(int(fault), {"Content-Type": "application/xml"}, b"<Error><Code>SlowDown</Code></Error>")
                return
            if fault == "slow":
                time.sleep(1.0)
            proxy.delay()
            status, headers, content = self._passed_on(body)
            proxy.count(self.command, len(body), len(content))
            if fault == "lost":  # the request was carried out, and the client is not told
                self.close_connection = True
            elif fault == "truncated" and self.command == "GET" and len(content) > 1:
                self._answer(status, headers, content[: len(content) // 2], claimed=len(content))
                self.close_connection = True
            else:
                self._answer(status, headers, content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            return b"".join(parts)

        def _passed_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(address, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in (*_HOP, "expect")}
            connection.request(
                self.command, self.path, body=body, headers={**headers, "Content-Length": str(len(body))}
            )
            response = connection.getresponse()
            content = response.read()
            kept = {name: value for name, value in response.getheaders() if name.lower() not in _HOP}
            if self.command == "HEAD":
                kept["Content-Length"] = response.getheader("Content-Length", "0")
            connection.close()
            return response.status, kept, content

        def _answer(self, status: int, headers: dict[str, str], content: bytes, claimed: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(content) if claimed is None else claimed))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """No line for each request."""

    return Handler
