"""Refuse settings that contain a password or key: configurations are stored as files and shown in web interfaces."""

import re
from collections.abc import Iterator

from rft_platform.config.resume import flat_settings
from rft_platform.config.schema import RftConfig
from rft_platform.redaction import holds_secret, redact

_QUERY_SECRET = re.compile(r"https?://[^\s?]+\?\S*(?:key|token|secret|password|sig)\S*=", re.IGNORECASE)
_INSTEAD = {
    "base_url": "put the key into an environment variable and name that in api_key_env, as in api_key_env: HELPER_KEY",
    "tracking_uri": "leave it out and set the environment variable MLFLOW_TRACKING_URI to it",
}
_ELSEWHERE = "put it into an environment variable and read that in your code"


def secret_problems(config: RftConfig) -> Iterator[str]:
    """One line for each setting that looks like a secret or a URL with a secret. The line masks the secret."""
    for key, value in flat_settings(config).items():
        if any(isinstance(text, str) and _is_secret(text) for text in (value if isinstance(value, list) else [value])):
            field = re.split(r"[.\[]", key)[-1]
            yield (
                f"{key} {redact(str(value))!r} holds a secret, and configurations are stored as plain text: "
                f"{_INSTEAD.get(field, _ELSEWHERE)}"
            )


def _is_secret(text: str) -> bool:
    return holds_secret(text) or _QUERY_SECRET.match(text) is not None
