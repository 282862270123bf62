"""Checks of a project that runs on a Ray cluster: access, versions, and room for what the project starts."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from rft_platform.cluster.interface import Bundle, Node
from rft_platform.common.errors import RftError, UserError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.findings import Finding, error, note, raised
from rft_platform.config.gpu_placement import engine_gpus, engine_share
from rft_platform.config.home import Home
from rft_platform.config.load import load_config_of
from rft_platform.rounds.project.project import Project


@dataclass(frozen=True, slots=True)
class Demand:
    """Processes that a project starts on the cluster."""

    what: str
    key: str  # the configuration key that changes it
    bundle: Bundle  # of each of them
    count: int = 1
    apart: bool = False  # each on another node


def machine_of(project: Project) -> Machine:
    """What the checks of settings compare the project with: this machine, or all nodes of its cluster."""
    if project.config.cluster.kind == "local":
        return Machine.here()
    return Machine(int(sum(node.cpus for node in project.cluster.nodes())), project.gpus)


def demands(project: Project) -> list[Demand]:
    """What the project starts on the cluster."""
    config, found = project.config, []
    share, explorer = engine_share(config, project.gpus), config.explorer
    if config.mode != "train" and not config.engine.urls:
        engine = Bundle(config.engine.threads, gpus=share)
        key = "explorer.rollout_model.tensor_parallel_size"
        found.append(Demand("engine", key, engine, explorer.rollout_model.engine_num))
        others = {name for name, _ in engine_gpus(config)} & {entry.lease for entry in config.policies}
        found += [Demand(name, key, engine) for name in sorted(others)]
    for model in explorer.auxiliary_models:
        if not model.base_url:
            own = Bundle(config.engine.threads, gpus=engine_share(config, project.gpus, model.lease))
            found.append(Demand(model.lease, "explorer.auxiliary_models", own, model.engine_num))
    if config.mode in ("both", "train", "colocate"):
        rank = Bundle(config.trainer.threads, gpus=float(project.gpus > 0))
        nodes = config.cluster.node_num
        found.append(Demand("trainer", "trainer.nproc", rank.times(config.trainer.nproc), nodes, apart=True))
    if explorer.workers.kind == "process" and config.mode != "train":
        worker = Bundle(explorer.workers.cpus, resources=explorer.workers.resources)
        found.append(Demand("worker", "explorer.workers", worker))
    return found


def placed(nodes: list[Node], wanted: list[Demand]) -> tuple[dict[str, list[str]], list[Demand]]:
    """The nodes that could hold each demand, all at once, the largest first; and the demands without room."""
    free = {node.name + f"#{number}": node for number, node in enumerate(nodes)}
    where: dict[str, list[str]] = {}
    homeless = []
    for demand in sorted(wanted, key=lambda each: (-each.bundle.gpus, -each.bundle.cpus)):
        own: list[str] = []
        for _ in range(demand.count):
            fits = [name for name, node in free.items() if node.holds(demand.bundle)]
            chosen = next((name for name in fits if not (demand.apart and name in own)), None)
            if chosen is None:
                homeless.append(demand)
                break
            free[chosen] = free[chosen].without(demand.bundle)
            own.append(chosen)
        where[demand.what] = [name.partition("#")[0] for name in own]
    return where, homeless


def placement_problems(project: Project) -> Iterator[Finding]:
    """What no node of the cluster can hold, alone or beside the rest."""
    config = project.config
    if config.cluster.kind == "local":
        return
    if config.mode == "colocate" and project.gpus:
        yield error("mode colocate shares GPUs between engines and trainer; with cluster.kind ray set mode: both")
    nodes, wanted = project.cluster.nodes(), demands(project)
    there = "; ".join(map(str, nodes))
    alone = [demand for demand in wanted if not any(node.holds(demand.bundle) for node in nodes)]
    for demand in alone:
        yield error(f"{demand.key}: no node has {demand.bundle} for the {demand.what} (there is {there})")
    least = config.cluster.gpu_per_node or 0
    if len([node for node in nodes if node.gpus >= least]) < config.cluster.node_num:
        yield error(f"cluster.node_num {config.cluster.node_num} with gpu_per_node {least}: there is {there}")
    for demand in placed(nodes, wanted)[1] if not alone else ():
        yield error(
            f"{demand.key}: the nodes have no room for {demand.count} x {demand.what} ({demand.bundle}) beside what "
            f"else the project starts (there is {there}); add nodes, or lower it"
        )


def access_problems(project: Project) -> Iterator[Finding]:
    """Nodes that accept commands without a token, or have other versions than this process."""
    if project.config.cluster.kind == "local":
        return
    from rft_platform.cluster.ray.connection import AUTH_VARIABLE, TOKEN_MODE
    from rft_platform.cluster.ray.ray_cluster import RayCluster

    cluster = project.cluster
    assert isinstance(cluster, RayCluster)
    own = {"Python": platform.python_version(), **{n: metadata.version(n) for n in ("ray", "rft-platform")}}
    for node, (*there, mode) in cluster.versions().items():
        for (name, version), other in zip(own.items(), there, strict=True):
            if version != other:
                yield error(f"node {node} has {name} {other}, this command {version}: install the same", key="cluster")
        if mode != TOKEN_MODE:
            yield error(
                f"node {node} runs without token authentication, so everybody who reaches its ports can run programs "
                f"on it: start it with {AUTH_VARIABLE}={TOKEN_MODE}",
                key="cluster",
            )


def environment_problems(project: Project) -> Iterator[Finding]:
    """A runtime environment of the workers that Ray refuses, or whose local files do not exist."""
    config = project.config
    if config.cluster.kind == "local" or not config.explorer.workers.runtime_env.fields:
        return
    from rft_platform.cluster.ray.runtime_environment import runtime_environment

    yield from raised(runtime_environment, config.explorer.workers.runtime_env.fields)


def placement_lines(project: Project) -> list[str]:
    """The nodes, and a placement of what the project starts; Ray may choose other nodes with room."""
    if project.config.cluster.kind == "local":
        return []
    nodes, wanted = project.cluster.nodes(), demands(project)
    where, _ = placed(nodes, wanted)
    lines = [f"node       {node}" for node in nodes]
    for demand in wanted:
        count = "each of them" if demand.what == "worker" else f"{demand.count} x"
        lines.append(f"{demand.what:10} {count} {demand.bundle}: on {', '.join(where[demand.what])}")
    if fields := project.config.explorer.workers.runtime_env.fields:
        if "env_vars" in fields:
            fields["env_vars"] = ", ".join(fields["env_vars"])  # names: the values may be long
        lines.append(f"{'':10} in a runtime environment: {'; '.join(f'{key} {each}' for key, each in fields.items())}")
    return lines


def cluster_findings(home: Home) -> Iterator[Finding]:
    """For ``rft doctor``: the nodes of the project's cluster, their GPUs and their versions."""
    if not home.config_file.exists():
        return
    try:
        config = load_config_of(home)
    except UserError:  # another check reports it
        return
    if config.cluster.kind == "local":
        return
    project = Project(home, config)
    try:
        for node in project.cluster.nodes():
            yield note(f"Ray node {node}", key="cluster")
        wrong = list(access_problems(project))
    except RftError as problem:
        yield error(str(problem), key="cluster")
        return
    yield from wrong or [note(f"all nodes have Ray {metadata.version('ray')} and require a token", key="cluster")]
