"""Errors in the form of OpenAI's API: an HTTP status and ``{"error": {"message", "type", "code", "param"}}``."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import (
    EngineError,
    RftError,
    StorageError,
    UserCodeError,
    UserError,
    WeightMismatchError,
)

if TYPE_CHECKING:
    from fastapi import FastAPI


#: Error code of this platform's engines and of OpenAI's API. Other servers report a too long prompt in the message
#: only.
TOO_LONG = "context_length_exceeded"
_WORDS = re.compile(
    rf"{TOO_LONG}|maximum context length|longer than the maximum model length|max_model_len|the model's context"
    r"|exceeds? the (?:available )?context"
)


class ApiError(Exception):
    """Refuses a request with ``status``."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s


class ContextLengthError(UserError):
    """The prompt is longer than the model's context."""


#: (class, HTTP status, code); the first class that the error is an instance of applies.
STATUS: list[tuple[type[RftError], int, str]] = [
    (ContextLengthError, 400, TOO_LONG),
    (UserError, 400, "invalid_value"),
    (WeightMismatchError, 409, "weights_refused"),
    (StorageError, 507, "storage_failed"),
    (EngineError, 503, "engine_unavailable"),
    (UserCodeError, 500, "user_code_failed"),
    (RftError, 500, "engine_failed"),
]


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Body of an error response."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """(status, body) of the response for an exception that a handler raised."""
    if isinstance(error, ApiError):
        return error.status, error_body(error.status, str(error), error.code, error.param)
    for kind, status, code in STATUS:
        if isinstance(error, kind):
            return status, error_body(status, str(error), code)
    return 500, error_body(500, f"{type(error).__name__}: {error}", "internal_error")


def invalid_fields(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The refusal of a body that pydantic refuses with ``problems``; names the first one."""
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    problem = first["msg"].removeprefix("Value error, ")
    message = f"{where}: {problem}" if where else problem if first["type"] == "value_error" else f"body: {problem}"
    return ApiError(400, message, "invalid_value", where or None)


def install(app: "FastAPI") -> None:
    """Register handlers so that ``app`` returns every error in this form."""
    # Imported here, because the environment of an agent may lack these packages.
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    async def known(_: Request, error: Exception) -> JSONResponse:
        status, body = describe(error)
        return JSONResponse(body, status)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return await known(_, invalid_fields(error.errors()))

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code)

    for kind in (ApiError, RftError, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def says_too_long(message: str) -> bool:
    """Whether an error message says that the prompt is too long."""
    return _WORDS.search(message) is not None


def is_too_long(status: int, body: str) -> bool:
    """Whether an HTTP response refuses a prompt because of its length."""
    return status == 400 and says_too_long(body)
