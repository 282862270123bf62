"""Alerts about failed runs, through ``observability.alert_channels``; used by the daemon's sensor and the driver.

A failed delivery never fails a run. Each run gets one alert, from whichever process sees the failure first.
"""

import logging
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import dagster as dg

from rft_platform.assets.run_failure import CAUSE_TAG, FAULT_TAG, RETRYABLE_TAG, UNKNOWN_CAUSE, fault_of
from rft_platform.cluster.local.locks import locked
from rft_platform.common.fault_classification import described
from rft_platform.common.files import write_json
from rft_platform.common.redaction import redact
from rft_platform.config.home import Home
from rft_platform.jobs.sensor_interval import sensor_interval_s
from rft_platform.observability.alert_channels import COMMAND, URL, deliver, has_channels
from rft_platform.online.project import open_project
from rft_platform.resources.names import PARTITION_TAG, DagsterNames
from rft_platform.resources.project import ProjectResource

LOG = logging.getLogger(__name__)

UI_URL = "RFT_UI_URL"
_DEFAULT_UI = "http://127.0.0.1:3000"
_KEPT_S = 30 * 24 * 3600.0  # how long an alert is remembered as sent


@dataclass(frozen=True, slots=True)
class Alert:
    """The fields of an alert; secrets are masked."""

    project: str
    round: str  # partition key; empty outside the rounds
    phase: str  # the job: explore_job, sync_round_job, ...
    run_id: str
    fault: str
    retryable: bool
    cause: str
    link: str  # to the run in the Dagster interface
    text: str  # the whole alert in one line


def alert_run_failed(home: Home, run: dg.DagsterRun, cause: str = "") -> bool:
    """Send an alert for a failed run unless one was sent before; returns whether this call delivered one.

    ``cause`` is used if the run has no tag ``rft/cause``. Raises nothing.
    """
    claim, delivered = home.alerts / f"{run.run_id}.json", False
    try:
        if not has_channels():
            return False
        alert = asdict(build_alert(_project_name(home), run, cause))
        if not _claim(claim):
            return False
        try:
            delivered = deliver(f"run {run.run_id}", alert)
        finally:
            if not delivered:
                claim.unlink()  # another process may still be able to deliver the alert
    except Exception as error:  # an alert must not turn one failure into two
        LOG.warning("no alert was sent for run %s: %s", run.run_id, described(error))
        return False
    return delivered


def build_alert(project: str, run: dg.DagsterRun, cause: str = "") -> Alert:
    """Build the alert of a failed run from its tags."""
    tags = fault_of(run)
    partition = run.tags.get(PARTITION_TAG, "")
    fault, described_cause = tags.get(FAULT_TAG, "orchestration"), redact(tags.get(CAUSE_TAG) or cause or UNKNOWN_CAUSE)
    link = f"{os.environ.get(UI_URL, _DEFAULT_UI).rstrip('/')}/runs/{run.run_id}"
    name = f"{run.job_name} of {partition}" if partition else run.job_name
    return Alert(
        project=project,
        round=partition,
        phase=run.job_name,
        run_id=run.run_id,
        fault=fault,
        retryable=tags.get(RETRYABLE_TAG, "true") == "true",
        cause=described_cause,
        link=link,
        text=f"{project}: {name} failed ({fault}): {described_cause} {link}",
    )


def alert_sensor(
    names: DagsterNames, jobs: Collection[str], assets: Collection[dg.AssetKey], *, own_instance: bool
) -> dg.SensorDefinition:
    """The sensor that sends an alert for a run that failed under the daemon, or whose driver died.

    A run belongs to the project if its job is one of ``jobs``, or if it materialises some of ``assets``. The runs of
    drivers belong to no code location: in a home's ``own_instance`` those of all code locations are read.
    """

    def alert_on_run_failure(context: dg.RunFailureSensorContext, project: ProjectResource) -> None:
        run, message = context.dagster_run, context.failure_event.message or ""
        is_own = run.job_name in jobs or not set(assets).isdisjoint(run.asset_selection or ())
        if is_own and alert_run_failed(project.place, run, message):
            context.log.info(f"sent an alert for failed run {run.run_id}")

    return dg.run_failure_sensor(
        name=names.name(alert_on_run_failure.__name__),
        description=f"Sends an alert for every failed run: by webhook ({URL}), by command ({COMMAND}), or not at all.",
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=sensor_interval_s(),
        monitor_all_code_locations=own_instance,
    )(names.bound(alert_on_run_failure))


def _claim(file: Path) -> bool:
    """Whether this caller is the first to send an alert for the run that ``file`` is named after."""
    with locked(file.with_name("alerts")):
        if file.exists():
            return False
        for old in file.parent.glob("*.json"):
            if time.time() - old.stat().st_mtime > _KEPT_S:
                old.unlink()
        write_json(file, {"claimed_at": time.time(), "pid": os.getpid()})
    return True


def _project_name(home: Home) -> str:
    """Project and name; the folder if the configuration cannot be read, which may be why the run failed."""
    try:
        config = open_project(home).config
    except Exception as error:
        LOG.warning("the alert names %s, because its project cannot be read: %s", home.root, described(error))
        return str(home.root)
    return f"{config.project}/{config.name}"
