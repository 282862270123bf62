"""Services as detached named actors of a Ray cluster, found by their names.

An actor never restarts by itself: the next ``ensure`` starts a new generation, as it does on one machine. So a service
that is lost comes back with another token and address, and its clients learn of it.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from rft_platform.cluster.interface import Address, Bundle, Node, Service, StartError, Status
from rft_platform.cluster.local.file_cluster import END_S, FileCluster, StartProgress
from rft_platform.cluster.ray.actors import NodeFacts, ServiceActor, WorkerActor, node_facts, travelling
from rft_platform.cluster.ray.connection import ClusterError, joined, kill, lost, node_of
from rft_platform.cluster.ray.groups import (
    MEMBER,
    endpoint_of,
    in_bundle,
    living_groups,
    node_selector,
    place_group,
    remove_groups,
    start_members,
)
from rft_platform.cluster.ray.ray_worker import RayWorker
from rft_platform.cluster.ray.runtime_environment import runtime_environment

_ASK_S = 15.0  # a node that is lost is declared dead after about so long
_POLL_S = 0.1
_FACTS_S = 60.0
_HAVE_HOME = dict[tuple[Path, str], bool]()  # whether a node, by its id, sees this folder of a home
_AT_ONCE = 16  # calls of a service's actor that do not wait for each other


class RayCluster(FileCluster):
    """A ``Cluster`` of Ray. Start locks and generations are files in the home, which only some nodes may see."""

    def __init__(
        self, leases: Path, logs: Path, address: str = "auto", namespace: str = "rft", *, has_copy: bool = False
    ) -> None:
        """``has_copy``: the home has one on an object store, so that nodes without the home can run engines."""
        super().__init__(leases.absolute(), logs.absolute())
        self._where, self._has_copy = (address, namespace), has_copy
        self._prefix = f"{hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]}/"

    @property
    def ray(self) -> Any:
        """The module ``ray``, joined to the cluster."""
        return joined(*self._where)

    def nodes(self) -> list[Node]:
        """The nodes that are alive; each has the home, as far as ``facts`` has not found otherwise."""
        known = [replace(node_of(each), has_home=self._has_home(node, True)) for node, each in self._alive().items()]
        return sorted(known, key=lambda node: node.name)

    def facts(self) -> dict[str, NodeFacts]:
        """What each living node says of itself, by its address and the start of its id.

        Raises ``ClusterError`` if a node runs no task, although it is not declared dead after a while.
        """
        found, deadline = dict[str, NodeFacts](), time.monotonic() + 2 * _ASK_S
        while silent := [node for node in self._alive() if node not in found]:
            found |= self._ask_nodes(silent)
            if time.monotonic() > deadline and (left := [node for node in silent if node not in found]):
                raise ClusterError(
                    f"node {left[0][:8]} of the Ray cluster runs no task: look at its raylet, or remove the node"
                )
            time.sleep(_POLL_S)
        names = {node: f"{described['NodeManagerAddress']} ({node[:8]})" for node, described in self._alive().items()}
        return {name: found[node] for node, name in names.items() if node in found}

    def _ask_nodes(self, nodes: Sequence[str]) -> dict[str, NodeFacts]:
        """What the nodes with these ids say of themselves; without those that do not answer."""
        ray, found = self.ray, dict[str, NodeFacts]()
        task = _remote(ray, node_facts)
        with _marked(self.folder) as (mark, text):
            asked = {node: task.options(num_cpus=0, max_retries=0, **_on(ray, node)) for node in nodes}
            answers = {node: each.remote(str(mark), text) for node, each in asked.items()}
            ray.wait(list(answers.values()), num_returns=len(answers), timeout=_FACTS_S)
        for node, answer in answers.items():
            with suppress(ray.exceptions.RayError):  # its node is lost
                found[node] = ray.get(answer, timeout=0)
        _HAVE_HOME.update({(self.folder, node): facts.has_home for node, facts in found.items()})
        return found

    def _has_home(self, node: str, otherwise: bool) -> bool:
        return _HAVE_HOME.get((self.folder, node), otherwise)

    def _alive(self) -> dict[str, Mapping[str, Any]]:
        """The living nodes as Ray describes them, by their ids."""
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    def find(self, name: str) -> Address | None:
        """The address of the service ``name``; None if its process does not run."""
        address: Address | None = self._ask(name, "address")
        return address

    def answers(self, address: Address) -> bool:
        """Whether the service answers, and none of its processes is stopped."""
        return self.find(address.name) == address and bool(self._ask(address.name, "answers"))

    def services(self, *patterns: str) -> dict[str, Status]:
        """The running services by name: nothing is left of those that have ended."""
        found = {name: self.find(name) for name in self._names(*patterns)}
        return {name: Status(address, runs=True) for name, address in found.items() if address is not None}

    def processor_seconds(self) -> dict[tuple[str, int], float]:
        """Processor time that each service has used since its start, by name and generation."""
        used: dict[tuple[str, int], float] = {}
        for name in self._names():
            used |= self._ask(name, "processor_seconds") or {}
        return used

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last lines that the service printed; asked of its node if that does not see the home."""
        asked = None if self.log_file(name).exists() else self._ask(name, "log_tail", name, lines)
        return super().log_tail(name, lines) if asked is None else str(asked)

    def stop_strays(self) -> list[int]:
        """End the actors whose service has not started; returns no process ids, which belong to other nodes."""
        for name in self._names():
            if self.find(name) is None:
                self._end_strays(name, END_S)
        return []

    def stop_all(self) -> None:
        """End all services."""
        for name in self._names():
            self.stop(name, END_S)

    def worker(
        self,
        module: str,
        *,
        python: str | None = None,
        log: Path,
        bundle: Bundle = Bundle(),
        runtime_env: Mapping[str, Any] | None = None,
    ) -> RayWorker:
        """Start an actor on any node with room for ``bundle``, spread over the nodes, and its child process.

        Raises UserError for a ``runtime_env`` that Ray refuses.
        """
        options = {**_reserved(bundle), "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        if runtime_env:
            options["runtime_env"] = runtime_environment(runtime_env)
        actor = _remote(self.ray, WorkerActor).options(**options).remote()
        own = (runtime_env or {}).get("env_vars", {})
        return RayWorker(self.ray, actor, module, python, log, {**travelling(os.environ), **own})

    def start(self, service: Service, generation: int) -> Address:
        """Start a detached actor that runs the service; the caller holds the start lock."""
        ray, bundle, name = self.ray, service.bundle.times(service.group.ranks), self._prefix + service.name
        nodes, environment = self.nodes(), travelling(os.environ)
        if not any(node.holds(bundle) for node in nodes):
            there = "; ".join(map(str, nodes))
            raise StartError(f"Service {service.name!r} cannot be placed: no node has {bundle} (there is {there})")

        def new(**options: Any) -> Any:
            fixed = {"lifetime": "detached", "max_restarts": 0, "max_concurrency": _AT_ONCE}
            return _remote(ray, ServiceActor).options(**_reserved(bundle), **fixed, **options).remote(str(self.logs))

        members, where = list[Any](), self._where_to_run(service, bundle)
        try:
            if service.group.nodes > 1:
                group = place_group(ray, f"{name}{MEMBER}{generation}", bundle, service, where.get("label_selector"))
                actor = new(name=name, **in_bundle(group, 0))
                service = replace(service, group=replace(service.group, endpoint=endpoint_of(ray, actor, service)))
                members = start_members(ray, new, group, f"{name}{MEMBER}{generation}.", service, environment)
            else:
                actor = new(name=name, **where)
            started = actor.start.remote(service, generation, environment, members)
            return self._started(service, started, [member.until_lost.remote() for member in members])
        except BaseException:
            self._kill(service.name)
            raise

    def _where_to_run(self, service: Service, bundle: Bundle) -> dict[str, Any]:
        """Options that place an actor of the service. Raises StartError if too few nodes with the home hold it.

        Nodes that do not answer are neither chosen nor avoided, as long as all others have the home.
        """
        nodes = {node: node_of(described) for node, described in self._alive().items()}
        if unknown := [node for node in nodes if (self.folder, node) not in _HAVE_HOME]:
            self._ask_nodes(unknown)
        with_home = [node for node in nodes if self._has_home(node, False)]
        apart = [node for node in nodes if not self._has_home(node, True)]
        reads_home = service.reads_home or not self._has_copy
        fitting = [node for node in with_home if nodes[node].holds(bundle)]
        if apart and reads_home and len(fitting) < service.group.nodes:
            there = "; ".join(str(nodes[node]) for node in with_home) or "none"
            raise StartError(
                f"Service {service.name!r} cannot be placed: it needs {service.group.nodes} x {bundle} on nodes that "
                f"see {self.folder.parent} (these are {there})"
            )
        return node_selector(with_home, apart, replace(service, reads_home=reads_home))

    def _started(self, service: Service, started: Any, losses: list[Any]) -> Address:
        """Wait for the answer of a starting actor, or for one of ``losses``: it would wait for that node in vain."""
        ray, progress = self.ray, StartProgress(service, self.log_file(service.name))
        deadline = time.monotonic() + service.start_timeout_s + END_S
        while not ray.wait([started], timeout=_POLL_S)[0]:
            progress.update()
            if losses and ray.wait(losses, timeout=0)[0]:
                raise StartError(f"Service {service.name!r}: a node of its group was lost while it started")
            if time.monotonic() > deadline:
                raise StartError(
                    f"Service {service.name!r} was not ready after {service.start_timeout_s:.0f} s: no node has room "
                    f"for it, or it is slow. {self.log_tail(service.name)}"
                )
        try:
            answer = ray.get(started)
        except lost(ray) as error:
            raise StartError(f"Service {service.name!r} was lost with its node while it started: {error}") from error
        if isinstance(answer, Address):
            return answer
        raise StartError(*answer)

    def _end(
        self, name: str, grace_s: float, shutdown_path: str = "", generation: int | None = None, alone: bool = False
    ) -> bool:
        actor = self._actor(name)  # all calls go to this one: its successor may get the name meanwhile
        if generation is not None:
            address = self._call(actor, "address")
            if address is None or address.generation != generation:
                return False
        timeout_s = None if shutdown_path else 3 * grace_s + _ASK_S  # with a path it ends after its work
        ran = bool(self._call(actor, "stop", grace_s, shutdown_path, timeout_s=timeout_s))
        if generation is None:
            self._kill(name)
        else:
            remove_groups(self.ray, f"{self._prefix}{name}{MEMBER}", generation)
            kill(self.ray, actor)
        return ran

    def _end_strays(self, name: str, grace_s: float, starter: str | None = None) -> None:
        if starter is None or self._started_by(name) == starter:
            self._end(name, grace_s)

    def _started_by(self, name: str) -> str | None:
        starter: str | None = self._ask(name, "started_by")
        return starter

    def _kill(self, name: str) -> None:
        """Kill the actors of a service, whose processes end with them, and wait until its name is free."""
        deadline = time.monotonic() + _ASK_S
        remove_groups(self.ray, f"{self._prefix}{name}{MEMBER}")
        while (actor := self._actor(name)) is not None and time.monotonic() < deadline:
            kill(self.ray, actor)
            time.sleep(_POLL_S)

    def _names(self, *patterns: str) -> Iterator[str]:
        """The names of the services that have an actor or a placement group; with ``patterns``, those that match."""
        own = [name for name in self.ray.util.list_named_actors() if name.startswith(self._prefix)]
        own += living_groups(self.ray, self._prefix)
        for name in sorted({name.removeprefix(self._prefix).partition(MEMBER)[0] for name in own}):
            if any(fnmatch(name, each) for each in patterns or ("*",)):
                yield name

    def _actor(self, name: str) -> Any:
        with suppress(ValueError):
            return self.ray.get_actor(self._prefix + name)
        return None

    def _ask(self, name: str, method: str, *arguments: Any) -> Any:
        """Call the actor of a service; None if it has none, or its process or node is gone."""
        return self._call(self._actor(name), method, *arguments)

    def _call(self, actor: Any, method: str, *arguments: Any, timeout_s: float | None = _ASK_S) -> Any:
        """Call an actor; None if there is none, or its process or node is gone.

        Ray says that an actor is unavailable while its node is not declared dead: the call is then repeated.
        """
        ray = self.ray
        deadline = time.monotonic() + _ASK_S
        while actor is not None:
            try:
                return ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)
            except ray.exceptions.ActorUnavailableError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
            except lost(ray):
                return None
        return None


@cache
def _remote(ray: Any, plain: Any) -> Any:
    """The actor class of a plain class, or the task of a function, once per process: Ray stores each in the cluster."""
    return ray.remote(plain)


@contextmanager
def _marked(folder: Path) -> Iterator[tuple[Path, str]]:
    """A file in ``folder`` during the block, by which nodes see whether they have the same folder; and its text."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    mark, text = folder / f".mark-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        mark.write_text(text)
        yield mark, text
    finally:
        mark.unlink(missing_ok=True)
        for each in made:
            with suppress(OSError):  # another process uses it meanwhile
                each.rmdir()


def _on(ray: Any, node: str) -> dict[str, Any]:
    """The option of a task or actor that runs on the node with this id."""
    return {"scheduling_strategy": ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)}


def _reserved(bundle: Bundle) -> Mapping[str, Any]:
    """``bundle`` as options of an actor."""
    return {"num_cpus": bundle.cpus, "num_gpus": bundle.gpus, "resources": dict(bundle.resources)}
