"""The HTTP package that ``openai`` is built on. Importing this module imports ``openai``: do so only to run agents."""

import importlib
from functools import cache
from typing import Any

import openai


def _wire_package() -> str:
    """``httpx2`` or ``httpx``: the one that the installed ``openai`` (3.x or 2.x) uses."""
    packages = (base.__module__.partition(".")[0] for base in openai.DefaultAsyncHttpxClient.__mro__)
    return next(name for name in packages if name in ("httpx", "httpx2"))


wire: Any = importlib.import_module(_wire_package())


@cache
def tls_context() -> Any:
    """What clients pass as ``verify``: the package would read all certificates again for each of them."""
    return wire.create_ssl_context()


#: Request extension with the estimated tokens of a request. An extension is not sent over the network.
TOKENS = "rft_tokens"

#: Request extension with the parsed body of a request, so that it is parsed once. Nobody changes it.
PARSED = "rft_parsed"

#: Request extension: send the request to the host of its URL, not to a replica of the first policy.
OTHER_ENGINE = "rft_other_engine"


def many_connections() -> Any:
    """Connections of a gateway to the engine: any number. Idle ones close before the server closes them (after 5 s)."""
    limits = wire.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0)
    return wire.AsyncHTTPTransport(verify=tls_context(), trust_env=False, limits=limits)
