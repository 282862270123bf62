"""Deliver alerts through a webhook, a command or both: failed runs, and exceeded limits of production traffic.

``RFT_ALERT_URL`` receives an alert as a JSON POST (Slack and similar services show its field ``text``);
``RFT_ALERT_COMMAND`` receives it on standard input. If neither is set, nothing is sent.
"""

import json
import logging
import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from rft_platform.cluster.child import Program
from rft_platform.common.errors import UserError
from rft_platform.common.fault_classification import described

LOG = logging.getLogger(__name__)

URL, COMMAND = "RFT_ALERT_URL", "RFT_ALERT_COMMAND"
TIMEOUT_S = 10.0  # for each of webhook and command


def has_channels() -> bool:
    """Whether alerts are sent at all."""
    return bool(_channels())


def deliver(what: str, alert: Mapping[str, Any]) -> bool:
    """Send the alert for ``what`` through every channel; returns whether one delivered it. A failure is logged."""
    payload = json.dumps(dict(alert), ensure_ascii=False).encode()
    delivered = [_delivered(channel, payload, what) for channel in _channels()]
    return any(delivered)


def _channels() -> list[Callable[[bytes], None]]:
    return [channel for name, channel in ((URL, _post), (COMMAND, _pipe)) if os.environ.get(name)]


def _delivered(channel: Callable[[bytes], None], payload: bytes, what: str) -> bool:
    try:
        channel(payload)
    except Exception as error:  # any error of the network or of the user's command
        LOG.warning("the alert for %s was not delivered: %s", what, described(error))
        return False
    LOG.info("sent an alert for %s", what)
    return True


def _post(payload: bytes) -> None:
    import httpx

    headers = {"content-type": "application/json"}
    httpx.post(os.environ[URL], content=payload, headers=headers, timeout=TIMEOUT_S).raise_for_status()


def _pipe(payload: bytes) -> None:
    command = shlex.split(os.environ[COMMAND])
    done = Program(command, wall_s=TIMEOUT_S, stdin=payload).run()
    if done.timed_out:
        raise UserError(f"{COMMAND} was killed after {TIMEOUT_S:g} s")
    if not done.ok:
        output = done.stderr.decode(errors="replace").strip()[-500:]
        raise UserError(f"{COMMAND} ended with exit code {done.exit_code}: {output or 'no output'}")
