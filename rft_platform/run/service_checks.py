"""Check before a run that the services it uses can be reached: judge models, auxiliary models, the registry."""

import os
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rft_platform.config.schema.rft_config import RftConfig

_LIMIT_S = 3.0
_PORTS = {"http": 80, "https": 443}


def service_problems(config: RftConfig) -> Iterator[str]:
    """One line for each address at which no process accepts a connection; each address is tried once."""
    tried: dict[tuple[str, int], str | None] = {}
    for key, url in _addresses(config):
        parts = urlsplit(url)
        if parts.hostname is None or parts.scheme not in _PORTS or _by_proxy(parts.scheme, parts.hostname):
            continue
        try:
            place = (parts.hostname, parts.port or _PORTS[parts.scheme])
        except ValueError as error:  # the port
            yield f"{key} {url}: {error}"
            continue
        if place not in tried:
            tried[place] = _refusal(place)
        if (reason := tried[place]) is not None:
            yield f"{key} {url}: nothing answers at {place[0]}:{place[1]} ({reason}); start it, or correct the address"


def _addresses(config: RftConfig) -> Iterator[tuple[str, str]]:
    if (uri := os.environ.get("MLFLOW_TRACKING_URI")) is not None:
        yield "MLFLOW_TRACKING_URI", uri
    elif config.registry.tracking_uri is not None:
        yield "registry.tracking_uri", config.registry.tracking_uri
    for index, entry in enumerate(config.explorer.auxiliary_models):
        if entry.base_url is not None:
            yield f"explorer.auxiliary_models[{index}].base_url", entry.base_url
    if config.online and config.service.implicit_feedback is not None:
        yield "service.implicit_feedback.base_url", config.service.implicit_feedback.base_url
    inputs = config.buffer.explorer_input
    for taskset in inputs.every.values():
        parts = taskset.judge if isinstance(taskset.judge, list) else []
        for arguments in [taskset.judge_args, *(part.args for part in parts)]:
            if (url := _base_url(arguments)) is not None:
                yield f"judge_args.model.base_url ({taskset.path})", url


def _base_url(arguments: dict[str, Any]) -> str | None:
    model = arguments.get("model")
    url = model.get("base_url") if isinstance(model, dict) else None
    return url if isinstance(url, str) else None


def _by_proxy(scheme: str, host: str) -> bool:
    """Whether clients reach the host through a proxy. A proxy may reach addresses that this machine cannot."""
    return scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)


def _refusal(place: tuple[str, int]) -> str | None:
    """Why no connection can be made; None if one was made."""
    try:
        socket.create_connection(place, _LIMIT_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None
