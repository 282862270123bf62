"""The HTTP package below ``openai``. Importing this module imports ``openai``: do so only to run agents."""

import importlib
from typing import Any

import openai


def _wire_package() -> str:
    """``httpx2`` or ``httpx``: the one that the installed ``openai`` (3.x or 2.x) is built on."""
    packages = (base.__module__.partition(".")[0] for base in openai.DefaultAsyncHttpxClient.__mro__)
    return next(name for name in packages if name in ("httpx", "httpx2"))


wire: Any = importlib.import_module(_wire_package())

#: Where a request says how many tokens it may take: an extension, which stays in this process.
TOKENS = "rft_tokens"

#: Likewise: the request is for the very host that it names, which is none of the replicas of the first policy.
ELSEWHERE = "rft_elsewhere"
