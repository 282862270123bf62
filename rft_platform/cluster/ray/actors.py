"""What runs on the nodes of a Ray cluster: plain classes, which ``RayCluster`` makes actors of.

An actor starts its service or its child as a process of its node, in the way of one machine, so limits, groups of
ranks and other interpreters work as they do there. The process ends with its actor: the kernel kills it when a pipe
that the actor holds open closes.
"""

import os
import platform
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from rft_platform.cluster.child import CallError, Child, ChildError
from rft_platform.cluster.interface import LOOPBACK, Address, Service, StartError
from rft_platform.cluster.local.leases import STARTER_VARIABLE, read_lease, root_of
from rft_platform.cluster.local.local_cluster import LocalCluster, command_of
from rft_platform.cluster.local.processes import exit_code, runs, start_detached
from rft_platform.cluster.local.service_process import LIFELINE_VARIABLE
from rft_platform.cluster.ray.connection import AUTH_VARIABLE

_WATCH_S = 0.5
_UNUSED_S = 120.0  # after so long an actor without a service ends: who made it has ended, too
#: Variables of the starting command that belong to its machine and not to the node of the actor.
_OF_MACHINE = ("RAY_", "CUDA_VISIBLE_DEVICES", "RFT_LEASE", "RFT_SERVICE", "TMPDIR", "HOSTNAME", "PWD")


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a command that its services and workers on other nodes need: all but those of its machine."""
    return {name: value for name, value in environment.items() if not name.startswith(_OF_MACHINE)}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself."""

    versions: Mapping[str, str]  # of Python, Ray and this platform, which must be the same on all nodes
    authentication: str  # Ray's mode
    has_home: bool  # whether it sees the home of the project, under the same path


def node_facts(mark: str, text: str) -> NodeFacts:
    """The facts of the node that runs this; ``mark`` is a file of the home, which holds ``text``."""
    try:
        has_home = Path(mark).read_text() == text
    except OSError:
        has_home = False
    versions = {"Python": platform.python_version(), **{name: version(name) for name in ("ray", "rft-platform")}}
    return NodeFacts(versions, os.environ.get(AUTH_VARIABLE, "disabled"), has_home)


class ServiceActor:
    """Runs one service on its node; its process ends when the service has ended."""

    def __init__(self, logs: str, unused_s: float = _UNUSED_S) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rft-service-"))
        self._cluster = LocalCluster(self._folder, Path(logs))
        self._name, self._stopping = "", False
        self._starter: str | None = None
        self._process: psutil.Process | None = None  # of the service: it may work on when it has withdrawn its lease
        self._lifeline = _held_open(self._folder / "lifeline")
        self._group = _own_group()
        self._unused_s = unused_s
        self._unused = self._ending_unused()

    def start(
        self, service: Service, generation: int, environment: Mapping[str, str], members: Sequence[Any] = ()
    ) -> Any:
        """Start the service; returns its address, or the arguments of a ``StartError``.

        ``environment`` is that of the command; as an argument of a constructor, Ray would keep it with the actor.
        ``members``: the actors of the further nodes of its group, without which it cannot go on.
        """
        self._unused.cancel()
        self._name, self._starter = service.name, environment.get(STARTER_VARIABLE)
        os.environ.update(environment)
        host = _node_address() if service.host == LOOPBACK else service.host
        try:
            address = self._cluster.start(replace(service, env=self._ending_with_this(service), host=host), generation)
        except StartError as error:
            self._unused = self._ending_unused()
            return str(error), error.exit_code, error.last_line
        lease = read_lease(self._cluster.lease_file(service.name))
        self._process = None if lease is None else root_of(lease)
        threading.Thread(target=self._end_with_service, daemon=True).start()
        if members:
            threading.Thread(target=self._end_with_member, args=(members,), daemon=True).start()
        return address

    def join(self, service: Service, node_rank: int, environment: Mapping[str, str]) -> None:
        """Run a further node of the service's group."""
        self._unused.cancel()
        os.environ.update(environment)
        env = {**os.environ, **self._ending_with_this(service)}
        log = self._cluster.log_file(f"{service.name}-node-{node_rank}")
        process = start_detached(command_of(service, node_rank), log, env)
        threading.Thread(target=self._end_with_node, args=(process,), daemon=True).start()

    def until_lost(self) -> None:
        """Never return: the call fails when this process is lost."""
        threading.Event().wait()

    def endpoint(self) -> str:
        """This node's address with a port that is free now."""
        host = _node_address()
        with socket.create_server((host, 0)) as probe:
            return f"{host}:{probe.getsockname()[1]}"

    def address(self) -> Address | None:
        """The address of the service; None before it has started, and after it has ended."""
        return self._cluster.find(self._name) if self._name else None

    def log_tail(self, name: str, lines: int) -> str:
        """The last lines that the service ``name`` printed on this node."""
        return self._cluster.log_tail(name, lines)

    def started_by(self) -> str | None:
        """The command that started the service; None if no command ends it."""
        return self._starter

    def answers(self) -> bool:
        """Whether the service answers, and none of its processes is stopped."""
        address = self.address()
        return address is not None and self._cluster.answers(address)

    def processor_seconds(self) -> dict[tuple[str, int], float]:
        """Processor time of the service."""
        return self._cluster.processor_seconds()

    def stop(self, grace_s: float, shutdown_path: str) -> bool:
        """End the service with everything that it started; returns whether it ran."""
        self._stopping = True
        deadline = time.monotonic() + grace_s
        while self.address() is None and self._works() and (shutdown_path or time.monotonic() < deadline):
            time.sleep(_WATCH_S)  # it ends by itself
        ran = bool(self._name) and self._cluster.stop(self._name, grace_s, shutdown_path=shutdown_path)
        shutil.rmtree(self._folder, ignore_errors=True)
        return ran

    def _ending_with_this(self, service: Service) -> dict[str, str]:
        """The variables of the service's processes, which end with this one."""
        return {**service.env, LIFELINE_VARIABLE: str(self._folder / "lifeline")}

    def _end_with_node(self, process: psutil.Process) -> None:
        """End this process when a further node of a group has failed.

        If its ranks have done their work, the group is removed when the first node has, too: it may save its state.
        """
        while runs(process):
            time.sleep(_WATCH_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        if exit_code(process) != 0:
            os._exit(0)

    def _end_with_member(self, members: Sequence[Any]) -> None:
        """End this process, and with it the whole group, when one of ``members`` is lost: the ranks would wait for it.

        While the service is being stopped, ``stop`` ends it.
        """
        import ray

        ray.wait([member.until_lost.remote() for member in members])
        if not self._stopping:
            self._leave()

    def _end_with_service(self) -> None:
        """End this process, which gives its resources back, when the service has ended by itself.

        A service that has withdrawn its lease may still work: an idle trainer saves its state.
        """
        while self.address() is not None or self._works():
            time.sleep(_WATCH_S)
        if not self._stopping:
            self._leave()

    def _works(self) -> bool:
        return self._process is not None and runs(self._process)

    def _ending_unused(self) -> threading.Timer:
        """A started timer that ends this process unless it gets a service."""
        timer = threading.Timer(self._unused_s, self._leave)
        timer.daemon = True
        timer.start()
        return timer

    def _leave(self) -> None:
        """End this process, and with it the placement group whose first actor it is."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._group is not None:
            import ray

            with suppress(Exception):  # another process may have removed it
                ray.util.remove_placement_group(self._group)
        os._exit(0)


def _node_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def _own_group() -> Any:
    """The placement group of this actor; None if it has none."""
    import ray

    return ray.util.get_current_placement_group()


def _held_open(path: Path) -> int:
    """Make a named pipe and hold it open, for ``end_with_parent`` in another process."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR)


def _variables(command: Mapping[str, str]) -> dict[str, str]:
    """The variables of a child: the command's win, except that folders of a runtime environment come first."""
    from ray import get_runtime_context

    variables = {**os.environ, **command}
    if get_runtime_context().runtime_env:
        for name in ("PYTHONPATH", "PATH"):
            values = os.environ.get(name, ""), command.get(name, "")
            variables[name] = os.pathsep.join(dict.fromkeys(filter(None, os.pathsep.join(values).split(os.pathsep))))
    return variables


class WorkerActor:
    """Runs one ``Child`` on its node. Its calls return streams: notes, and at last the result or the failure."""

    def __init__(self) -> None:
        self._child: Child | None = None

    async def start(
        self, module: str, python: str | None, log: str, environment: Mapping[str, str]
    ) -> tuple[str, str | None]:
        """Start the process; returns the id of this node, and why it cannot be started or None."""
        from ray import get_runtime_context

        node = str(get_runtime_context().get_node_id())
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._child = Child(module, python=python, log=Path(log), env=_variables(environment))
        except OSError as error:
            return node, error.strerror or str(error)
        return node, None

    async def ask(self, function: str, arguments: list[Any], wall_s: float | None) -> AsyncIterator[tuple[str, Any]]:
        """Call a function of the child; yields ``("note", value)`` ..., then one pair that ends the call."""
        import asyncio

        assert self._child is not None
        notes: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        call = asyncio.ensure_future(
            self._child.ask_async(
                function, *arguments, wall_s=wall_s, on_note=lambda note: notes.put_nowait(("note", note))
            )
        )
        call.add_done_callback(lambda done: notes.put_nowait(("end", None)))
        while (item := await notes.get())[0] == "note":
            yield item
        try:
            yield "value", call.result()
        except CallError as error:
            yield "call_error", (error.kind, error.text)
        except ChildError as error:
            yield type(error).__name__, (str(error), error.how, error.started, error.tail)

    def __del__(self) -> None:
        with suppress(Exception):
            if self._child is not None:
                self._child.kill()
