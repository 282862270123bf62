"""Engines that somebody else runs: ``engine.urls``. They are found, checked and used, but neither started nor ended."""

from pathlib import Path

import httpx

from rft_platform.cluster.interface import tls_context
from rft_platform.common.errors import EngineError, UserError
from rft_platform.inference.client import CONNECT_TIMEOUT_S, STATUS_TIMEOUT_S, EngineClient, status_in
from rft_platform.inference.serving.weight_files import model_digest

_MISSING = (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED)
_REFUSED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


def external_engine(url: str, token: str, model: Path | None = None) -> EngineClient:
    """A client of the engine at ``url``.

    Raises EngineError if the engine does not answer. Raises UserError if it is no engine of this version, refuses the
    token, or serves another model than the folder ``model``.
    """
    client = EngineClient(url, token=token)
    key = f"engine.urls {client.url}"
    try:
        answer = httpx.post(
            f"{client.url}/engine/status", json={}, headers={"Authorization": f"Bearer {token}"}, trust_env=False,
            verify=tls_context(), timeout=httpx.Timeout(STATUS_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        )  # fmt: skip
    except httpx.HTTPError as error:
        raise EngineError(f"{key}: the engine does not answer: {error or type(error).__name__}") from error
    if answer.status_code in _MISSING:
        raise UserError(
            f"{key}: this server has no control plane (/engine/status): it cannot change weights, like a stock vLLM; "
            "serve the engine with `rft engine`"
        )
    if answer.status_code in _REFUSED:
        raise UserError(f"{key}: refused ({answer.status_code}): {answer.text[:300]}; correct engine.token_env")
    if not answer.is_success:
        raise EngineError(f"{key}: the engine answers /engine/status with {answer.status_code}: {answer.text[:300]}")
    status = status_in(answer.content, key)
    if model is not None and status.model_digest != (wanted := model_digest(model)):
        raise UserError(
            f"{key}: serves another model: the files of its folder {status.model_path} have digest "
            f"{status.model_digest[:12]}, those of {model.absolute()} have {wanted[:12]}: serve that folder there"
        )
    return client
