"""The access token of a project's web servers: from an environment variable, or generated once and kept in the home."""

import os
import re
import secrets
from pathlib import Path

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import UserError
from rft_platform.common.files import atomic_path
from rft_platform.common.redaction import hide

TOKEN_VARIABLE = "RFT_WEB_TOKEN"
_SHAPE = re.compile(r"[A-Za-z0-9._~-]{16,}")


def access_token(file: Path) -> str:
    """``RFT_WEB_TOKEN``, else the token in ``file``, which is created (mode 0600) if it is missing or invalid.

    Raises UserError if the variable is too short or has characters that are not safe in a URL. The token is masked in
    logs.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and not _SHAPE.fullmatch(token):
        raise UserError(
            f"{TOKEN_VARIABLE} is not usable: expected at least 16 letters, digits or . _ ~ -, such as the output of "
            "`openssl rand -hex 32`"
        )
    token = token or _kept(file)
    hide(token)
    return token


def _kept(file: Path) -> str:
    with locked(file):
        token = file.read_text(encoding="ascii", errors="replace").strip() if file.exists() else ""
        if not _SHAPE.fullmatch(token):
            token = secrets.token_urlsafe(32)
            with atomic_path(file) as temporary, os.fdopen(_private(temporary), "w", encoding="ascii") as stream:
                stream.write(token + "\n")
    return token


def _private(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
