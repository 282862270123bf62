"""Checks of texts: names that become folders or parts of names in MLflow, and settings that contain a secret.

Configurations are stored as files and shown in web interfaces, so a password or key in them is refused.
"""

import re
from collections.abc import Iterator

from rft_platform.common.redaction import holds_secret, redact
from rft_platform.config.allowed_changes import flat_settings
from rft_platform.config.schema.rft_config import RftConfig

_LONGEST = 100  # characters: folder names and MLflow allow 250 bytes, and a character may take four
_FORBIDDEN = "/\\:'\""


def name_problems(config: RftConfig) -> Iterator[str]:
    """One line for each invalid name."""
    names = {"project": config.project, "name": config.name}
    if config.registry.model_name is not None:
        names["registry.model_name"] = config.registry.model_name
    tasksets = config.buffer.explorer_input.every
    names |= {f"{key}.name": taskset.name for key, taskset in tasksets.items() if taskset.name is not None}
    for key, name in names.items():
        if (fault := _fault(name)) is not None:
            yield f"{key} {name!r}: {fault}; expected a name such as gsm8k-first"


def _fault(name: str) -> str | None:
    if not name.strip():
        return "is empty"
    if name != name.strip():
        return "begins or ends with a space"
    if name in (".", ".."):
        return "refers to another folder"
    if found := [character for character in _FORBIDDEN if character in name]:
        return f"has the character {found[0]!r}, which folder names or MLflow do not allow"
    if not name.isprintable():
        return "has characters that cannot be printed"
    return f"is longer than {_LONGEST} characters" if len(name) > _LONGEST else None


_QUERY_SECRET = re.compile(r"https?://[^\s?]+\?\S*(?:key|token|secret|password|sig)\S*=", re.IGNORECASE)
_INSTEAD = {
    "base_url": "put the key into an environment variable and name that in api_key_env, as in api_key_env: HELPER_KEY",
    "tracking_uri": "leave it out and set the environment variable MLFLOW_TRACKING_URI to it",
    "database": "leave out the password, and give it by the environment variable PGPASSWORD or the file ~/.pgpass",
}
_DATABASE = "buffer.trainer_input.experience_buffer.path"
_ELSEWHERE = "put it into an environment variable and read that in your code"


def secret_problems(config: RftConfig) -> Iterator[str]:
    """One line for each setting that contains a secret, also within a URL. The line masks the secret."""
    for key, value in flat_settings(config).items():
        if any(isinstance(text, str) and _is_secret(text) for text in (value if isinstance(value, list) else [value])):
            field = "database" if key == _DATABASE else re.split(r"[.\[]", key)[-1]
            yield (
                f"{key} {redact(str(value))!r} contains a secret, and configurations are stored as plain text: "
                f"{_INSTEAD.get(field, _ELSEWHERE)}"
            )


def _is_secret(text: str) -> bool:
    return holds_secret(text) or _QUERY_SECRET.match(text) is not None
