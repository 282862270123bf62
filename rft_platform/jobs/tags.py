"""Tags of every run, whoever launches it: they make runs findable and dead drivers recognisable."""

import os

import psutil

from rft_platform.experience.rounds import round_key
from rft_platform.processes.lease import find_process
from rft_platform.rounds.provenance import code_version

DRIVER_TAG = "rft/driver"


def run_tags(round_number: int) -> dict[str, str]:
    """Round and code of a run."""
    return {"rft/round": round_key(round_number), "rft/code": code_version()}


def driver_tags() -> dict[str, str]:
    """Which process drives the run itself, so that a later driver can tell that it died."""
    return {DRIVER_TAG: f"{os.getpid()}@{psutil.Process().create_time()}"}


def driver_is_alive(tag: str) -> bool:
    """Whether the process that a ``driver_tags`` value names still runs."""
    pid, _, created = tag.partition("@")
    return find_process(int(pid), float(created)) is not None
