"""This machine and its installation: properties that results depend on, and checks that yield what works and what not.

Torch is only imported to check it.
"""

import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

from rft_platform.cluster.interface import Address
from rft_platform.common.errors import EngineError, RftError, UserError
from rft_platform.common.fault_classification import as_fault
from rft_platform.common.sqlite_files import damaged_databases, databases, full_disk
from rft_platform.config.checks.machine import cpu_count
from rft_platform.config.engine_choice import engine_python, installed_in
from rft_platform.config.findings import Finding, error, note, raised, warning
from rft_platform.config.gpu_placement import POLICY_ENGINE, gpu_count
from rft_platform.config.home import Home
from rft_platform.config.load import load_config_of
from rft_platform.run.project_checks import check_room, check_writable, nearest_folder
from rft_platform.servers.ports import DAGSTER_PORT, MLFLOW_PORT, port_is_free

_PACKAGE = "rft-platform"
_PORTS = {
    DAGSTER_PORT: ("the Dagster interface", "`rft ui --port N` uses another one"),
    MLFLOW_PORT: ("the MLflow interface", "`rft ui --mlflow-port N` uses another one"),
}


def machine_facts() -> dict[str, Any]:
    """Processor, memory, GPUs and the package versions that a result depends on."""
    import psutil

    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": cpu_count(),
        "gpus": gpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("torch", "transformers", "dagster", "mlflow")},
    }


def installed_version(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def python_findings(_home: Home) -> Iterator[Finding]:
    """Compare the interpreter with the range that the package requires."""
    from packaging.specifiers import SpecifierSet

    wanted = metadata.metadata(_PACKAGE)["Requires-Python"]
    version = ".".join(map(str, sys.version_info[:3]))
    if SpecifierSet(wanted).contains(version):
        yield note(f"{version} at {sys.executable}", key="python")
    else:
        fix = "create the environment with another Python version"
        yield error(f"{version}; {wanted} is needed: {fix}", key="python")


def package_findings(_home: Home) -> Iterator[Finding]:
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
        yield error(f"{problem}: pip install '{requirement}'", key="packages")
    yield note(f"{good} packages have supported versions", key="packages")


def home_findings(home: Home) -> Iterator[Finding]:
    """Check that the project's folder is writable and has enough space."""
    problems = [*raised(check_writable, home), *raised(check_room, home.root)]
    yield from problems
    if not problems:
        free = shutil.disk_usage(nearest_folder(home.root)).free
        yield note(f"{home.root}, {free / 2**30:.1f} GiB free", key="RFT_HOME")


def database_findings(home: Home) -> Iterator[Finding]:
    """Check that every database of the project can be read, page by page."""
    if databases(home.root) and (full := full_disk(home.root)):
        yield error(f"{full}; `rft doctor` then checks them", key="database")
        return
    damaged = list(damaged_databases(home.root, thorough=True))
    for database in damaged:
        yield error(f"{database.path} is damaged ({database.why}): {database.remedy}", key="database")
    if whole := len(databases(home.root)) - len(damaged):
        yield note(f"{whole} can be read", key="database")


def partition_findings(home: Home) -> Iterator[Finding]:
    """Find partitions in Dagster that name no round."""
    if not (home.dagster / "dagster.yaml").exists():
        return
    from rft_platform.jobs.instance import open_instance
    from rft_platform.jobs.jobs import unknown_partitions

    try:
        with open_instance(home) as instance:
            unknown = unknown_partitions(instance)
    except Exception as problem:  # a damaged database or settings file can raise anything
        reason = str(as_fault(problem)).splitlines()[0]
        yield error(f"cannot be read: {reason}; repair the databases in {home.dagster}", key="partitions")
        return
    if unknown:
        names = f"{', '.join(unknown)}, which are not rounds (r0001, r0002, ...)"
        yield warning(
            f"Dagster has the partitions {names}: no action needed, they and their runs are ignored", key="partitions"
        )


def process_findings(home: Home) -> Iterator[Finding]:
    """Check the engine's replicas and the trainer."""
    services = home.cluster.services()
    versions: set[tuple[int, str]] = set()  # served by the policy's replicas; other engines may serve other ones
    for name, status in services.items():
        kind, pid = status.address.details["kind"], status.address.details["pid"]
        where = f"pid {pid}, {status.address.url.removeprefix('http://')}"
        if status.runs and kind.startswith("engine"):
            is_replica = name == POLICY_ENGINE or name.startswith(f"{POLICY_ENGINE}-")
            yield _engine_finding(name, status.address, where, versions if is_replica else set())
        elif status.runs:
            yield note(f"{name} runs ({where})", key="process")
        else:
            problem = f"{name} has ended and left its lease {home.leases / name}.json ({where})"
            yield warning(f"{problem}: `rft stop` removes it; the next start also replaces it", key="process")
    if len(versions) > 1:
        served = ", ".join(str(version) for version, _ in sorted(versions))
        yield warning(
            f"the engine's replicas serve different weights (policy versions {served}): no action needed, the next use "
            "of the engine updates all replicas",
            key="process",
        )
    if not services:
        yield note("neither engine nor trainer is running; they start when they are needed", key="process")


def _engine_finding(name: str, address: Address, where: str, versions: set[tuple[int, str]]) -> Finding:
    """Check that the engine answers; add the version it serves to ``versions``."""
    from rft_platform.inference.client import EngineClient

    try:
        status = EngineClient(address).status()
    except EngineError as problem:
        return error(f"{name} does not answer ({where}): {problem}; `rft stop` ends it", key="process")
    versions.add((status.policy_version, status.weights_digest))
    return note(f"{name} serves policy version {status.policy_version} ({where})", key="process")


def port_findings(home: Home) -> Iterator[Finding]:
    """Check that the default ports of the servers are free, or used by a server of this home."""
    for port, (what, fix) in _PORTS.items():
        if port_is_free(port):
            yield note(f"{port} is free for {what}", key="port")
        elif (pid := _own_listener(home, port)) is not None:
            yield note(f"{port} serves {what} of this project (pid {pid})", key="port")
        else:
            yield warning(f"{port} is in use, so {what} cannot use it: {fix}", key="port")


def _own_listener(home: Home, port: int) -> int | None:
    """The id of this home's process that listens on ``port``; None if another or an unknown process does."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:  # macOS shows connections to root only
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or getattr(connection.laddr, "port", None) != port:
            continue
        if connection.pid:
            with suppress(psutil.Error):
                if psutil.Process(connection.pid).environ().get("RFT_HOME") == str(home.root):
                    return connection.pid
    return None


def device_findings(home: Home) -> Iterator[Finding]:
    """Check torch, the GPUs it sees, and vLLM."""
    try:
        import torch
    except Exception as problem:  # a broken installation can raise anything
        yield error(f"cannot be imported: {problem}; install the pinned version of torch again", key="torch")
        return
    try:
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as problem:  # AssertionError: the driver is too old
        reason = str(problem).partition("\n")[0]
        fix = "check the driver with `nvidia-smi`; after a change of the driver restart the machine"
        yield error(f"{torch.__version__} cannot use the GPUs: {reason}; {fix}", key="torch")
        return
    found = f"{len(devices)} x {devices[0]}" if devices else f"no GPU, {cpu_count()} processors"
    if gpu_count() and not devices:
        fix = "install a CUDA build of torch that the driver supports"
        yield warning(f"{torch.__version__} sees none of the {gpu_count()} GPUs: {fix}", key="torch")
    else:
        yield note(f"{torch.__version__}, {found}", key="torch")
    yield _vllm_finding(home, has_gpus=bool(devices))


def _vllm_finding(home: Home, has_gpus: bool) -> Finding:
    """The vLLM of the interpreter that the home's engines would use."""
    configured = None
    if home.config_file.exists():
        with suppress(RftError):  # the check of the project reports it
            configured = load_config_of(home).engine.python
    python = engine_python(configured)
    where = "" if python == sys.executable else f" in {python}"
    try:
        found = installed_in(python)
    except UserError as problem:
        return warning(str(problem), key="vllm")
    if found is not None:
        return note(f"{found.version}{where}", key="vllm")
    if has_gpus:
        slower = f"is not installed{where}; engine.kind auto uses the slower transformers engine"
        return warning(f"{slower}: pip install 'rft-platform[gpu]'", key="vllm")
    return note(f"is not installed{where}; without a GPU the transformers engine is used", key="vllm")


def definition_findings(home: Home) -> Iterator[Finding]:
    """Check that Dagster can load the definitions."""
    started = perf_counter()
    try:
        import dagster as dg

        from rft_platform.project_definitions import all_definitions, stored_definitions

        definitions = stored_definitions(home) if home.config_file.exists() else all_definitions()
        dg.Definitions.validate_loadable(definitions)
    except (dg.DagsterError, RftError, ImportError) as problem:
        reason = str(problem).splitlines()[0]
        yield error(f"{reason}; run `dagster definitions validate` for details", key="definitions")
        return
    yield note(f"load in {perf_counter() - started:.1f} s", key="definitions")
