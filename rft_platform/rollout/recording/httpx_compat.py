"""The HTTP package that ``openai`` is built on. Importing this module imports ``openai``: do so only to run agents."""

import importlib
from typing import Any

import openai


def _wire_package() -> str:
    """``httpx2`` or ``httpx``: the one that the installed ``openai`` (3.x or 2.x) uses."""
    packages = (base.__module__.partition(".")[0] for base in openai.DefaultAsyncHttpxClient.__mro__)
    return next(name for name in packages if name in ("httpx", "httpx2"))


wire: Any = importlib.import_module(_wire_package())

#: Request extension with the tokens that the request may take. Extensions stay in this process.
TOKENS = "rft_tokens"

#: Request extension: send the request to the host that it names, not to a replica of the first policy.
ELSEWHERE = "rft_elsewhere"
