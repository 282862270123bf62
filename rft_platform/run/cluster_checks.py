"""Checks of a project that runs on a Ray cluster: access, versions, and room for what the project starts."""

import platform
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata

from rft_platform.common.errors import RftError, UserError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.findings import Finding, error, has_errors, note, raised
from rft_platform.config.home import Home
from rft_platform.config.load import load_config_of
from rft_platform.config.node_placement import demands, placed
from rft_platform.rounds.project.project import Project


def machine_of(project: Project) -> Machine:
    """What the checks of settings compare the project with: this machine, or all nodes of its cluster."""
    if project.config.cluster.kind == "local":
        if not project.config.online:
            return Machine.here()
        from rft_platform.jobs.instance import launches_elsewhere

        return replace(Machine.here(), trains=not launches_elsewhere(project.home))
    return Machine(int(sum(node.cpus for node in project.cluster.nodes())), project.gpus)


def placement_problems(project: Project) -> Iterator[Finding]:
    """What no node of the cluster can hold, alone or beside the rest."""
    config = project.config
    if config.cluster.kind == "local":
        return
    if config.mode == "colocate" and project.gpus:
        yield error("mode colocate shares GPUs between engines and trainer; with cluster.kind ray set mode: both")
    nodes, wanted = project.cluster.nodes(), demands(config, project.gpus)
    there = "; ".join(map(str, nodes))
    alone = [demand for demand in wanted if not any(map(demand.fits, nodes))]
    all_have_home = all(node.has_home for node in nodes)
    for demand in alone:
        which = "no node" if all_have_home or not demand.reads_home else f"no node that sees {project.home.root}"
        yield error(f"{demand.key}: {which} has {demand.bundle} for the {demand.what} (there is {there})")
    least = config.cluster.gpu_per_node or 0
    if len([node for node in nodes if node.gpus >= least]) < config.cluster.node_num:
        yield error(f"cluster.node_num {config.cluster.node_num} with gpu_per_node {least}: there is {there}")
    for demand in placed(nodes, wanted)[1] if not alone else ():
        yield error(
            f"{demand.key}: the nodes have no room for {demand.count} x {demand.what} ({demand.bundle}) beside what "
            f"else the project starts (there is {there}); add nodes, or lower it"
        )


def access_problems(project: Project) -> Iterator[Finding]:
    """Nodes that accept commands without a token, have other versions than this process, or lack what they need."""
    if project.config.cluster.kind == "local":
        return
    from rft_platform.cluster.ray.connection import AUTH_VARIABLE, TOKEN_MODE
    from rft_platform.cluster.ray.ray_cluster import RayCluster

    cluster = project.cluster
    assert isinstance(cluster, RayCluster)
    own = {"Python": platform.python_version(), **{n: metadata.version(n) for n in ("ray", "rft-platform")}}
    for node, facts in cluster.facts().items():
        for name, version in own.items():
            if (other := facts.versions[name]) != version:
                yield error(f"node {node} has {name} {other}, this command {version}: install the same", key="cluster")
        if facts.authentication != TOKEN_MODE:
            yield error(
                f"node {node} runs without token authentication, so everybody who reaches its ports can run programs "
                f"on it: start it with {AUTH_VARIABLE}={TOKEN_MODE}",
                key="cluster",
            )
        if not facts.has_home:
            yield _without_home(project, node)


def _without_home(project: Project, node: str) -> Finding:
    """What a node that does not see the home can and cannot run."""
    config, what = project.config, f"node {node} does not see {project.home.root}"
    if config.store_url is None:
        text = f"{what}: mount it there under this path, or set store_url, so that engines there can fetch weights"
        return error(text, key="cluster")
    text = f"{what}: it runs workers, and engines that fetch weights from store_url, but no trainer"
    return note(text, key="cluster")


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
    nodes, wanted = project.cluster.nodes(), demands(project.config, project.gpus)
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
        found = list(access_problems(project))
        for node in project.cluster.nodes():
            yield note(f"Ray node {node}", key="cluster")
    except RftError as problem:
        yield error(str(problem), key="cluster")
        return
    yield from found
    if not has_errors(found):
        yield note(f"all nodes have Ray {metadata.version('ray')} and require a token", key="cluster")
