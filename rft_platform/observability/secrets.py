"""What must not reach a log: tokens, keys, passwords, and URLs that carry them."""

import os
import re
from collections.abc import Mapping
from functools import lru_cache

MASK = "***"
_LEAST_LENGTH = 6  # a shorter value would also be a part of ordinary words
_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)
#: Variables that hold a URL which is itself a secret, or holds one.
_SECRET_URLS = ("RFT_ALERT_URL", "RFT_DAGSTER_POSTGRES_URL", "MLFLOW_BACKEND_STORE_URI")

_NAMES = r"(?:[\w-]*[_-])?(?:api[_-]?key|access[_-]?key|secret[_-]?key|token|secret|password|passwd|authorization)"
_PATTERNS = [
    (re.compile(r"(?<=://)[^\s/@:'\"]*(?::[^\s/@'\"]*)?@"), f"{MASK}@"),  # user and password of a URL
    (re.compile(r"(https://hooks\.slack\.com/)\S+"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {MASK}"),
    (re.compile(rf"(?i)\b({_NAMES}=['\"]?)[^\s&,;'\")]+"), rf"\1{MASK}"),  # name=value, query strings
    (re.compile(rf"(?i)(['\"]{_NAMES}['\"]\s*:\s*['\"])[^'\"]*"), rf"\1{MASK}"),  # JSON and Python dictionaries
    (re.compile(r"\b(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abprs]-|AKIA)[A-Za-z0-9_-]{12,}"), rf"\1{MASK}"),
]
_registered: set[str] = set()


def hide(secret: str) -> None:
    """From now on this very text is masked in every log line of the process, however it gets there."""
    if len(secret) >= _LEAST_LENGTH:
        _registered.add(secret)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """``text`` with everything masked that is, or looks like, a secret.

    The values of the environment's secret-looking variables (default: this process's) are masked wherever they occur.
    """
    for value in sorted({*_registered, *_secret_values(environment)}, key=len, reverse=True):
        text = text.replace(value, MASK)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _secret_values(environment: Mapping[str, str] | None) -> tuple[str, ...]:
    given = os.environ if environment is None else environment
    return _values(tuple((name, value) for name, value in given.items() if _names_a_secret(name)))


@lru_cache(maxsize=4096)
def _names_a_secret(name: str) -> bool:
    return name in _SECRET_URLS or _SECRET_NAME.search(name) is not None


@lru_cache(maxsize=16)
def _values(pairs: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """The secrets among the variables: whole values, and the passwords of URLs (which also travel alone)."""
    found = [value for _, value in pairs if len(value) >= _LEAST_LENGTH]
    passwords = (re.search(r"://[^/@:]*:([^/@]+)@", value) for value in found)
    return (*found, *(match[1] for match in passwords if match and len(match[1]) >= _LEAST_LENGTH))
