"""The checks of ``rft doctor``: one function per subject; it yields findings, with a fix for each problem."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from time import perf_counter
from typing import Literal

from rft_platform.cluster.local.leases import Lease
from rft_platform.common.errors import EngineError, RftError, UserError
from rft_platform.common.fault_classification import as_fault
from rft_platform.common.sqlite_files import damaged_databases, databases, full_disk
from rft_platform.config.gpu_placement import gpu_count
from rft_platform.config.home import Home
from rft_platform.config.memory_plan import gpu_bytes
from rft_platform.run.machine import cpu_count, installed_version
from rft_platform.run.preflight import check_room, check_writable, nearest_folder
from rft_platform.servers.ports import DAGSTER_PORT, MLFLOW_PORT, port_is_free

_PACKAGE = "rft-platform"
_PORTS = {
    DAGSTER_PORT: ("the Dagster interface", "`rft ui --port N` uses another one"),
    MLFLOW_PORT: ("the MLflow interface", "`rft ui --mlflow-port N` uses another one"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    state: Literal["ok", "warn", "fail"]
    said: str
    fix: str = ""


def findings(home: Home) -> Iterator[Finding]:
    """All checks, cheapest first."""
    yield from python_findings()
    yield from package_findings()
    yield from home_findings(home)
    yield from config_findings(home)
    yield from database_findings(home)
    yield from partition_findings(home)
    yield from process_findings(home)
    yield from port_findings(home)
    yield from device_findings()
    yield from definition_findings(home)


def python_findings() -> Iterator[Finding]:
    """Compare the interpreter with the range that the package requires."""
    from packaging.specifiers import SpecifierSet

    wanted = metadata.metadata(_PACKAGE)["Requires-Python"]
    version = ".".join(map(str, sys.version_info[:3]))
    if SpecifierSet(wanted).contains(version):
        yield Finding("python", "ok", f"{version} at {sys.executable}")
    else:
        yield Finding(
            "python", "fail", f"{version}; {wanted} is needed", "create the environment with another Python version"
        )


def package_findings() -> Iterator[Finding]:
    """Compare installed versions with the package's bounds, without optional extras."""
    from packaging.requirements import Requirement

    good = 0
    for text in metadata.requires(_PACKAGE) or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            good += 1
            continue
        problem = f"{requirement.name} {version or 'is not installed'}; {requirement.specifier} is needed"
        yield Finding("packages", "fail", problem, f"pip install '{requirement}'")
    yield Finding("packages", "ok", f"{good} packages have supported versions")


def home_findings(home: Home) -> Iterator[Finding]:
    """Check that the project's folder is writable and has enough space."""
    try:
        check_writable(home)
        check_room(home)
    except UserError as error:
        yield Finding("RFT_HOME", "fail", str(error), "see above")
        return
    import shutil

    free = shutil.disk_usage(nearest_folder(home.root)).free
    yield Finding("RFT_HOME", "ok", f"{home.root}, {free / 2**30:.1f} GiB free")


def config_findings(home: Home) -> Iterator[Finding]:
    """Check that the project's configuration is still valid here."""
    from rft_platform.config.checks.check_config import check_config
    from rft_platform.config.load import load_config_of
    from rft_platform.config.resolve import resolve

    if not home.config_file.exists():
        yield Finding("project", "ok", "none yet; `rft demo` or `rft run --config FILE` starts one")
        return
    try:
        config = load_config_of(home)
        check_config(resolve(config), cpu_count=cpu_count(), gpu_count=gpu_count(), gpu_bytes=gpu_bytes())
    except UserError as error:
        for line in str(error).splitlines():
            yield Finding("project", "fail", line, f"correct {home.config_file} or the file it refers to")
        return
    yield Finding("project", "ok", f"{config.project}/{config.name}, {home.config_file}")


def database_findings(home: Home) -> Iterator[Finding]:
    """Check that every database of the project can be read, page by page."""
    if databases(home.root) and (full := full_disk(home.root)):
        yield Finding("database", "fail", full, "`rft doctor` then checks them")
        return
    damaged = list(damaged_databases(home.root, thorough=True))
    for database in damaged:
        yield Finding("database", "fail", f"{database.path} is damaged ({database.why})", database.remedy)
    whole = len(databases(home.root)) - len(damaged)
    if whole:
        yield Finding("database", "ok", f"{whole} can be read")


def partition_findings(home: Home) -> Iterator[Finding]:
    """Find partitions in Dagster that name no round."""
    if not (home.dagster / "dagster.yaml").exists():
        return
    from rft_platform.jobs.instance import open_instance
    from rft_platform.jobs.jobs import unknown_partitions

    try:
        with open_instance(home) as instance:
            unknown = unknown_partitions(instance)
    except Exception as error:  # a damaged database or settings file can raise anything
        reason = str(as_fault(error)).splitlines()[0]
        yield Finding("partitions", "fail", f"cannot be read: {reason}", f"repair the databases in {home.dagster}")
        return
    if unknown:
        problem = f"Dagster has the partitions {', '.join(unknown)}, which are not rounds (r0001, r0002, ...)"
        yield Finding("partitions", "warn", problem, "no action needed: they and their runs are ignored")


def process_findings(home: Home) -> Iterator[Finding]:
    """Check the engine's replicas and the trainer by their leases."""
    leases = home.cluster.leases()
    versions: set[tuple[int, str]] = set()
    for name, lease in leases.items():
        where = f"pid {lease.pid}, {lease.host}:{lease.port}"
        if lease.alive and lease.kind.startswith("engine"):
            yield _engine_finding(name, lease, where, versions)
        elif lease.alive:
            yield Finding("process", "ok", f"{lease.kind} runs ({where})")
        else:
            problem = f"{lease.kind} has ended and left its lease {home.cluster.lease_file(name)} ({where})"
            yield Finding("process", "warn", problem, "`rft stop` removes it; the next start also replaces it")
    if len(versions) > 1:
        served = ", ".join(str(version) for version, _ in sorted(versions))
        problem = f"the engine's replicas serve different weights (policy versions {served})"
        yield Finding("process", "warn", problem, "the next use of the engine updates all replicas; no action needed")
    if not leases:
        yield Finding("process", "ok", "neither engine nor trainer is running; they start when they are needed")


def _engine_finding(name: str, lease: Lease, where: str, versions: set[tuple[int, str]]) -> Finding:
    """Check that the engine answers; add the version it serves to ``versions``."""
    from rft_platform.inference.client import EngineClient

    try:
        status = EngineClient(lease.address(name)).status()
    except EngineError as error:
        return Finding("process", "fail", f"{lease.kind} does not answer ({where}): {error}", "`rft stop` ends it")
    versions.add((status.policy_version, status.weights_digest))
    message = f"{lease.kind} serves policy version {status.policy_version} ({where})"
    return Finding("process", "ok", message)


def port_findings(home: Home) -> Iterator[Finding]:
    """Check that the default ports of the servers are free, or used by a server of this home."""
    for port, (what, fix) in _PORTS.items():
        if port_is_free(port):
            yield Finding("port", "ok", f"{port} is free for {what}")
        elif (pid := _own_listener(home, port)) is not None:
            yield Finding("port", "ok", f"{port} serves {what} of this project (pid {pid})")
        else:
            yield Finding("port", "warn", f"{port} is in use, so {what} cannot use it", fix)


def _own_listener(home: Home, port: int) -> int | None:
    """The id of this home's process that listens on ``port``; None if another or an unknown process does."""
    import psutil

    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or getattr(connection.laddr, "port", None) != port:
            continue
        if connection.pid:
            with suppress(psutil.Error):
                if psutil.Process(connection.pid).environ().get("RFT_HOME") == str(home.root):
                    return connection.pid
    return None


def device_findings() -> Iterator[Finding]:
    """Check torch, the GPUs it sees, and vLLM."""
    try:
        import torch
    except Exception as error:  # a broken installation can raise anything
        yield Finding("torch", "fail", f"cannot be imported: {error}", "install the pinned version of torch again")
        return
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = f"{len(devices)} x {devices[0]}" if devices else f"no GPU, {cpu_count()} processors"
    if gpu_count() and not devices:
        fix = "install a CUDA build of torch that the driver supports"
        yield Finding("torch", "warn", f"{torch.__version__} sees none of the {gpu_count()} GPUs", fix)
    else:
        yield Finding("torch", "ok", f"{torch.__version__}, {found}")
    vllm = installed_version("vllm")
    if vllm is None and devices:
        yield Finding(
            "vllm",
            "warn",
            "is not installed; engine.kind auto uses the slower transformers engine",
            "pip install 'rft-platform[gpu]'",
        )
    else:
        yield Finding("vllm", "ok", vllm or "is not installed; without a GPU the transformers engine is used")


def definition_findings(home: Home) -> Iterator[Finding]:
    """Check that Dagster can load the definitions."""
    import os

    os.environ.setdefault("RFT_HOME", str(home.root))
    started = perf_counter()
    try:
        import dagster as dg

        from rft_platform.definitions import defs

        dg.Definitions.validate_loadable(defs)
    except (dg.DagsterError, RftError, ImportError) as error:
        yield Finding(
            "definitions", "fail", str(error).splitlines()[0], "run `dagster definitions validate` for details"
        )
        return
    yield Finding("definitions", "ok", f"load in {perf_counter() - started:.1f} s")
