"""Properties of this machine, found without importing torch."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from rft_platform.config.gpu_placement import gpu_count


def cpu_count() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
