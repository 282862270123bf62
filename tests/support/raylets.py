"""A Ray cluster of a few raylets on this host, with token authentication, which ends with the process that started it.

``python -m tests.support.raylets COUNT`` is the cluster: it prints its address and then obeys lines on standard input
(``add``, ``add FOLDER``, ``kill INDEX``, ``pids``) until that closes.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.hidden_folder import hide

REPOSITORY = Path(__file__).parents[2]
#: Ray replaces 127.0.0.1 by the address of the host's network interface, unless this is 0.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
#: One token for all clusters of a process: Ray reads it once.
TOKEN = secrets.token_hex(32)
_STARTS = 4
NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80 << 20}


class Raylets:
    """A running cluster."""

    def __init__(self, process: "subprocess.Popen[str]", environment: dict[str, str]) -> None:
        self._process = process
        self.environment = environment  # what a process needs to join the cluster
        self.address: str = self._read()["address"]

    def add(self, hidden: Path | None = None) -> int:
        """Add a node with the resource ``extra-NUMBER``; returns its number.

        It does not see the folder ``hidden``, as a machine with file systems of its own; a test is skipped if this user
        may not hide folders.
        """
        answer = self._order(f"add {hidden or ''}")
        if "refused" in answer:
            pytest.skip(f"this user may not mount file systems: {answer['refused']}")
        return int(answer["index"])

    def kill(self, index: int) -> str:
        """Kill a raylet with SIGKILL; returns the id of its node. Number 0 is the first one beside the head."""
        return str(self._order(f"kill {index}")["node"])

    def pids(self) -> dict[int, int]:
        """The process ids of the living raylets beside that of the head, by number."""
        return {int(index): pid for index, pid in self._order("pids").items()}

    def _order(self, line: str) -> Any:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) and not line.startswith("{"):
            pass
        assert line, f"the cluster has ended with exit code {self._process.wait()}"
        return json.loads(line)


@contextmanager
def raylets(count: int) -> Iterator[Raylets]:
    """A cluster of ``count`` nodes, the head included; the variables of ``environment`` are set in this process too."""
    # a short path: Ray puts sockets below it
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = {
            **LOOPBACK,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
        }
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.raylets", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            start_new_session=True,  # an interruption of the command is not one of the cluster, which ends after it
        )
        try:
            yield Raylets(process, environment)
        finally:
            if "ray" in sys.modules:  # Ray ends a process that has joined a cluster a minute after the cluster is gone
                sys.modules["ray"].shutdown()
            process.communicate(timeout=60)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def main(count: int) -> None:
    """Run the cluster until standard input closes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False}, connect=False)
    nodes = [cluster.add_node(**NODE) for _ in range(count - 1)]
    try:
        print(json.dumps({"address": cluster.address}), flush=True)
        for line in sys.stdin:
            order, *number = line.split()
            if order == "add":
                print(json.dumps(_add(cluster, nodes, number)), flush=True)
            elif order == "pids":
                raylets = {index: node.all_processes.get("raylet") for index, node in enumerate(nodes)}
                print(json.dumps({index: held[0].process.pid for index, held in raylets.items() if held}), flush=True)
            else:
                node = nodes[int(number[0])]
                cluster.remove_node(node, allow_graceful=False)
                print(json.dumps({"node": node.node_id}), flush=True)
    finally:
        cluster.shutdown()


def _add(cluster: Any, nodes: list[Any], hidden: list[str]) -> dict[str, Any]:
    try:
        for folder in hidden:
            hide(folder)
    except PermissionError as error:
        return {"refused": str(error)}
    nodes.append(_added(cluster, {f"extra-{len(nodes)}": 1}))
    return {"index": len(nodes) - 1}


def _added(cluster: Any, resources: dict[str, int]) -> Any:
    """A further node. Ray gives one 30 seconds to start, which a busy machine may exceed."""
    for attempt in range(_STARTS):
        try:
            return cluster.add_node(**NODE, resources=resources)
        except Exception:
            if attempt == _STARTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


if __name__ == "__main__":
    main(int(sys.argv[1]))
