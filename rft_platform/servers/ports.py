"""Check the ports of the servers, before anything is written or started."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from rft_platform.common.errors import UserError

DAGSTER_PORT = 3000  # default of `rft ui` and `rft serve`
MLFLOW_PORT = 5000


@dataclass(frozen=True, slots=True)
class Port:
    """A loopback port that a server will listen on."""

    number: int
    server: str
    setting: str
    """Option or configuration key that sets it."""


def check_ports(ports: Sequence[Port]) -> None:
    """Raise UserError for a port that is taken, reserved, or used twice."""
    first: dict[int, Port] = {}
    for port in ports:
        other = first.setdefault(port.number, port)
        if other is not port:
            both = f"{other.server} and {port.server}"
            raise UserError(f"port {port.number} is used twice, for {both}: choose another with {port.setting}")
        if not may_listen(port.number):
            raise UserError(
                f"port {port.number} is reserved for the system: choose 1024 or higher for {port.server} "
                f"with {port.setting}"
            )
        if not port_is_free(port.number):
            raise UserError(
                f"port {port.number} is taken: free it, or choose another one for {port.server} with {port.setting}"
            )


def port_is_free(port: int) -> bool:
    """Whether this port of the loopback interface is free."""
    return _bind_error(port) is None


def may_listen(port: int) -> bool:
    """Whether this user has the permission to listen on this port."""
    return not isinstance(_bind_error(port), PermissionError)


def _bind_error(port: int) -> OSError | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error
    return None
