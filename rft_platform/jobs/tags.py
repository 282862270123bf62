"""Tags of every run, whoever launches it; they make runs searchable and dead drivers detectable."""

import os

import dagster as dg
import psutil

from rft_platform.experience.rounds import round_key
from rft_platform.processes.lease import find_process
from rft_platform.rounds.provenance import code_version

DRIVER_TAG = "rft/driver"


def run_tags(round_number: int) -> dict[str, str]:
    """Round and code version of a run."""
    return {"rft/round": round_key(round_number), "rft/code": code_version()}


def driver_tags(run_id: str) -> dict[str, str]:
    """The driver process of the run, so that a later driver can detect its death."""
    return {DRIVER_TAG: f"{os.getpid()}@{psutil.Process().create_time()}@{run_id}"}


def driver_of(run: dg.DagsterRun) -> str | None:
    """The run's own driver tag; None if no driver runs it.

    A re-executed run inherits its tags. A tag that names another run is therefore ignored.
    """
    tag = run.tags.get(DRIVER_TAG)
    return tag if tag is not None and tag.partition("@")[2].partition("@")[2] in ("", run.run_id) else None


def driver_is_alive(tag: str) -> bool:
    """Whether the process in a ``driver_tags`` value still runs."""
    pid, created, *_ = tag.split("@")
    return find_process(int(pid), float(created)) is not None
