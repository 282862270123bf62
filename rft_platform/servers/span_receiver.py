"""``rft receive``: an OTLP/HTTP receiver that stores spans and log records in the project's home."""

import asyncio
import base64
import logging
import zlib
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rft_platform.common import json_codec
from rft_platform.common.errors import RftError
from rft_platform.common.fault_classification import described
from rft_platform.common.personal_data import Redaction
from rft_platform.config.home import Home
from rft_platform.inference.serving.http_server import serve
from rft_platform.inference.serving.request_body import read_body
from rft_platform.openai_api.errors import ApiError
from rft_platform.traces.readers.base import UNREADABLE
from rft_platform.traces.received import ReceivedSpans
from rft_platform.web_guard.asgi import WebGuard

MAX_REQUEST_BYTES = 16 << 20  #: of a request, also after it is decompressed
_PROTOBUF, _JSON = "application/x-protobuf", "application/json"
_IDS = ("traceId", "spanId", "parentSpanId")  # protobuf's JSON has them in base64, OTLP's JSON in hexadecimal digits
_HEALTH = "/healthz"
_GRACE_S = 5
_log = logging.getLogger(__name__)


def receiver_app(home: Home, token: str, redaction: Redaction) -> ASGIApp:
    """An ASGI application with the paths ``/v1/traces`` and ``/v1/logs``, which need ``token``, and ``/healthz``."""
    received = ReceivedSpans(home)

    async def export(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (_PROTOBUF, _JSON):
            return _error(415, f"content type {kind[:100]!r}: expected {_PROTOBUF} or {_JSON}")
        try:
            body = await read_body(request.receive, MAX_REQUEST_BYTES)
            stored = await asyncio.to_thread(_store, received, redaction, request, kind, body)
        except ApiError as error:
            return _error(error.status, str(error))
        except (OSError, RftError) as error:  # a full disk, or a redaction that fails; the exporter tries again
            _log.warning("spans were not stored: %s", described(error))
            return _error(503, "the spans could not be stored; see the receiver's log")
        _log.info("%d spans and log records stored", stored)
        return Response(b"" if kind == _PROTOBUF else b"{}", media_type=kind)

    def health(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    routes = [Route(path, export, methods=["POST"]) for path in ("/v1/traces", "/v1/logs")]
    return WebGuard(Starlette(routes=[*routes, Route(_HEALTH, health)]), token, public={_HEALTH})


def serve_receiver(
    home: Home, host: str, port: int, token: str, redaction: Redaction, listening: Callable[[], None]
) -> None:
    """Serve until interrupted; ``listening`` is called when the port takes connections."""
    serve(receiver_app(home, token, redaction), host, port, _GRACE_S, listening)


def _store(received: ReceivedSpans, redaction: Redaction, request: Request, kind: str, body: bytes) -> int:
    """Store the body of a request. Raises ApiError (400, 413) for a body that is no export request."""
    try:
        if request.headers.get("content-encoding", "identity").lower() == "gzip":
            body = _decompressed(body)
        found = json_codec.parse_object(body) if kind == _JSON else _from_protobuf(request.url.path, body)
        return received.add(found, redaction)
    except UNREADABLE as error:
        raise ApiError(400, f"the body is no OTLP export request ({type(error).__name__})", "invalid_value") from error


def _decompressed(body: bytes) -> bytes:
    """Raises ApiError (413) before more than ``MAX_REQUEST_BYTES`` are in memory."""
    inflate = zlib.decompressobj(wbits=31)
    try:
        found = inflate.decompress(body, MAX_REQUEST_BYTES)
    except zlib.error as error:
        raise ApiError(400, f"the body is not compressed by gzip: {error}", "invalid_value") from error
    if not inflate.eof:
        if inflate.unconsumed_tail:
            raise ApiError(413, f"the body has more than {MAX_REQUEST_BYTES >> 20} MiB", "request_too_large")
        raise ApiError(400, "the body of gzip is not complete", "invalid_value")
    return found


def _from_protobuf(path: str, body: bytes) -> dict[str, Any]:
    """An export request as OTLP JSON. Raises ValueError for other bytes."""
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = ExportLogsServiceRequest() if path == "/v1/logs" else ExportTraceServiceRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    found = MessageToDict(message)
    return _with_hex_ids(found) or {"resourceLogs" if path == "/v1/logs" else "resourceSpans": []}


def _with_hex_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_hex_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: base64.b64decode(each).hex() if name in _IDS and isinstance(each, str) else _with_hex_ids(each)
        for name, each in value.items()
    }


def _error(status: int, message: str) -> Response:
    return JSONResponse({"code": status, "message": message}, status)
