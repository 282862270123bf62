"""What a benchmark ran on: kept beside its numbers."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rft_platform.run.machine import machine_facts


def describe(device: str = "cpu") -> dict[str, Any]:
    """Processor, memory, accelerator, versions, and how busy the machine is now."""
    import torch

    found = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine_facts(),
        "processor": _processor(),
        "load_1_min": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    """Name and family of the processor, as Linux tells them."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return f"{facts.get('model name')} (family {facts.get('cpu family')}, model {facts.get('model')})"
