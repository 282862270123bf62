"""Ports for servers of tests, benchmarks and the chaos tool."""

import socket


def free_port() -> int:
    """A currently free TCP port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
