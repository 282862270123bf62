"""Mask secrets in text for logs, databases and terminals: tokens, keys, passwords, and URLs that contain them.

``visible`` shows control characters of foreign text, which change a terminal's title, hide text or reverse it.

``redact`` masks all text that leaves the process: in log formatters (``observability/logs.py``), standard output and
error (``masked_output.py``), the platform's errors (``errors.py``), descriptions of any other error
(``fault_classification.described``) and Dagster's instance (``jobs/dagster_internals``). This module imports only the
standard library, because rollout workers run in other environments. What users count as personal data is removed by
``personal_data``.
"""

import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from urllib.parse import quote, quote_plus

MASK = "***"
_LEAST_LENGTH = 6  # a shorter value could be part of ordinary words
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|KEY)(?:_|$)|(?:TOKEN|KEY|(?:^|_)PASS|(?:^|_)PWD)(?:_?\d{1,4})?$"
    r"|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL",
    re.IGNORECASE,
)
_NUMBER_OF_TOKENS = re.compile(r"(?:MAX|MIN|NUM)_TOKEN|TOKEN_(?:LEN|LIMIT|COUNT|BUDGET)", re.IGNORECASE)
#: Variables whose value is a URL that is itself a secret or contains one.
_SECRET_URLS = ("RFT_ALERT_URL", "RFT_DAGSTER_POSTGRES_URL", "MLFLOW_BACKEND_STORE_URI")

# At most 40 characters before the keyword: an unbounded prefix takes quadratic time on long texts.
_NAMES = r"(?:[\w-]{0,40}[_-])?(?:api[_-]?key|access[_-]?key|secret[_-]?key|token|secret|password|passwd|authorization)"
_PART = r"[A-Za-z0-9_-]{8,2000}+"  # bounded for the same reason
_PATTERNS = [
    # User and password of a URL, except the placeholder USER:PASSWORD in messages.
    (re.compile(r"(?<=://)(?!USER:PASSWORD@)[^\s/@:'\"]*(?::[^\s/@'\"]*)?@"), f"{MASK}@"),
    (re.compile(r"(https://hooks\.slack\.com/)\S+"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {MASK}"),
    (re.compile(rf"(?i)\b({_NAMES}=['\"]?)[^\s&,;'\")]+"), rf"\1{MASK}"),  # name=value, query strings
    (re.compile(rf"(?i)(['\"]{_NAMES}['\"]\s*:\s*['\"])[^'\"]*"), rf"\1{MASK}"),  # JSON and Python dictionaries
    (re.compile(r"(?i)\b((?:x-)?api-key\s*:\s*)[^\s,;'\"]+"), rf"\1{MASK}"),  # a header with a key
    (re.compile(rf"\beyJ{_PART}\.eyJ{_PART}\.[A-Za-z0-9_-]*"), MASK),  # a JSON web token
    (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[^-]+"), rf"\1{MASK}"),
    (
        re.compile(
            r"\b(hf_|sk-|gsk_|AIza|nvapi-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|ya29\.)"
            r"[A-Za-z0-9_-]{12,}"
        ),
        rf"\1{MASK}",
    ),
]
#: The first and the last pattern: these match no ordinary setting.
_UNMISTAKABLE = (_PATTERNS[0], _PATTERNS[-1])
_DATABASE_USER = re.compile(r"^((?:postgresql|postgres|mysql|mariadb)(?:\+\w+)?://)[^\s/@:'\"]+@")
# All control characters except tab and line feed, the line separators of Unicode, and the marks for text direction.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_registered: set[str] = set()


def hide(secret: str) -> None:
    """Make ``redact`` mask this text from now on in this process."""
    if len(secret) >= _LEAST_LENGTH:
        _registered.update(_spellings(secret))


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Mask everything in ``text`` that is or looks like a secret.

    This includes the values of variables with secret-like names in ``environment`` (default: this process's).
    """
    return secret_masker(environment)(text)


def secret_masker(environment: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """``redact`` for many texts: it reads the secrets once."""
    values = sorted({*_registered, *_secret_values(environment)}, key=len, reverse=True)

    def masked(text: str) -> str:
        for value in values:
            text = text.replace(value, MASK)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text

    return masked


def visible(text: str) -> str:
    r"""``text`` with each control character as ``\x1b`` or ``\u202e``; tabs and line feeds are unchanged."""
    return _CONTROL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def holds_secret(setting: str) -> bool:
    """Whether the value of a setting contains a URL's password or a well-known kind of key.

    The user name of a database is no secret; that of another URL may be a token.
    """
    without_user = _DATABASE_USER.sub(r"\1", setting)
    return any(pattern.search(without_user) for pattern, _ in _UNMISTAKABLE)


def _secret_values(environment: Mapping[str, str] | None) -> tuple[str, ...]:
    given = os.environ if environment is None else environment
    return _values(tuple((name, value) for name, value in given.items() if names_a_secret(name)))


@lru_cache(maxsize=4096)
def names_a_secret(name: str) -> bool:
    """Whether an environment variable with this name has a secret as its value; PWD is the working directory."""
    return name in _SECRET_URLS or (name != "PWD" and bool(_SECRET_NAME.search(_NUMBER_OF_TOKENS.sub("", name))))


@lru_cache(maxsize=16)
def _values(pairs: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """The secrets in the variables: whole values, and the passwords of URLs, which also occur alone."""
    found = [value for _, value in pairs if len(value) >= _LEAST_LENGTH]
    passwords = (re.search(r"://[^/@:]*:([^/@]+)@", value) for value in found)
    found += [match[1] for match in passwords if match and len(match[1]) >= _LEAST_LENGTH]
    return tuple(dict.fromkeys(spelling for value in found for spelling in _spellings(value)))


def _spellings(secret: str) -> tuple[str, ...]:
    """The secret unchanged, in capitals, URL-encoded, escaped as in Python and JSON strings, and in base64."""
    escaped = secret.encode("unicode_escape").decode("ascii")
    quoted = (quote(secret, safe=""), quote(secret), quote_plus(secret), escaped, escaped.replace('"', '\\"'))
    return (secret, secret.upper(), *quoted, *_in_base64(secret.encode()))


def _in_base64(secret: bytes) -> Iterator[str]:
    """The secret in base64, also as a part of other text such as ``user:secret`` (HTTP Basic authentication).

    A group of three bytes has four characters. Characters that also depend on neighbouring bytes are left out.
    """
    for before in range(3):
        encode = b64encode(bytes(before) + secret)
        first, last = -(-before * 8 // 6), (before + len(secret)) * 8 // 6
        text = encode[first:last].decode("ascii")
        yield from (text, text.replace("+", "-").replace("/", "_"))
