"""Alerts: one a failed run, to a webhook or a command, and never the cause of another failure."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import psutil
import pytest

from rft_platform.cluster.local.processes import stop_process
from rft_platform.common.files import write_text
from rft_platform.definitions import defs
from rft_platform.jobs.alerts import alert_run_failed, alert_sensor
from rft_platform.jobs.dagster_internals.run_launcher import DRIVER_TAG
from rft_platform.jobs.instance import open_instance
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.project.project import Project
from rft_platform.run.driver import drive

from .conftest import Inbox

TAGS = {"dagster/partition": "r0003", "rft/fault": "engine", "rft/retryable": "true", "rft/cause": "no answer"}


def failed_run(**tags: str) -> dg.DagsterRun:
    return dg.DagsterRun(job_name="explore_job", run_id="1f2e3d4c", tags={**TAGS, **tags})


def test_a_webhook_gets_every_field_of_the_alert(
    project: Project, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_ALERT_URL", inbox.url)
    monkeypatch.setenv("RFT_UI_URL", "https://rft.example/")
    assert alert_run_failed(project.home, failed_run())
    (alert,) = inbox.received
    link = "https://rft.example/runs/1f2e3d4c"
    assert alert == {
        "project": "sums/paper",
        "round": "r0003",
        "phase": "explore_job",
        "run_id": "1f2e3d4c",
        "fault": "engine",
        "retryable": True,
        "cause": "no answer",
        "link": link,
        "text": f"sums/paper: explore_job of r0003 failed (engine): no answer {link}",
    }


def test_every_failed_run_is_alerted_once(project: Project, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_ALERT_URL", inbox.url)
    assert alert_run_failed(project.home, failed_run())
    assert not alert_run_failed(project.home, failed_run())
    assert alert_run_failed(project.home, dg.DagsterRun(job_name="explore_job", run_id="other"))
    assert [alert["run_id"] for alert in inbox.received] == ["1f2e3d4c", "other"]


def test_a_refusing_webhook_is_logged_without_its_address_and_another_try_is_open(
    project: Project, inbox: Inbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RFT_ALERT_URL", inbox.url)
    inbox.status = 500
    with caplog.at_level(logging.WARNING):
        assert not alert_run_failed(project.home, failed_run())
    (record,) = caplog.records
    assert "the alert for run 1f2e3d4c was not delivered: HTTPStatusError" in record.getMessage()
    assert "s3cr3tpath" not in record.getMessage()
    inbox.status = 200
    assert alert_run_failed(project.home, failed_run())
    assert len(inbox.received) == 2


def test_a_command_gets_the_alert_on_standard_input(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen.json"
    monkeypatch.setenv(
        "RFT_ALERT_COMMAND", f'{sys.executable} -c \'import sys; open("{seen}", "w").write(sys.stdin.read())\''
    )
    assert alert_run_failed(project.home, failed_run(**{"rft/cause": "hub says token=abcdef"}))
    assert json.loads(seen.read_text())["cause"] == "hub says token=***"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/no/such/program", "FileNotFoundError"),
        (f"{sys.executable} -c 'import sys; sys.exit(\"broken\")'", "exit code 1: broken"),
        (f"{sys.executable} -c 'import time; time.sleep(600)'", "killed after 0.5 s"),
        ("unbalanced 'quotes", "No closing quotation"),
    ],
)
def test_a_broken_command_raises_nothing(
    project: Project, command: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rft_platform.observability.alert_channels.TIMEOUT_S", 0.5)
    monkeypatch.setenv("RFT_ALERT_COMMAND", command)
    with caplog.at_level(logging.WARNING):
        assert not alert_run_failed(project.home, failed_run())
    assert said in caplog.text


def test_an_alert_is_sent_though_the_configuration_cannot_be_read(
    project: Project, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_ALERT_URL", inbox.url)
    write_text(project.home.config_file, "project: [broken")
    assert alert_run_failed(project.home, failed_run())
    (alert,) = inbox.received
    assert (alert["project"], alert["run_id"]) == (str(project.home.root), "1f2e3d4c")


def test_an_error_of_the_delivery_leaves_another_try_open(
    project: Project, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_ALERT_URL", inbox.url)
    with monkeypatch.context() as patched:
        patched.setattr("rft_platform.jobs.alerts.deliver", lambda what, alert: json.dumps(object()))
        assert not alert_run_failed(project.home, failed_run())
    assert alert_run_failed(project.home, failed_run())


def test_nothing_is_sent_or_stored_without_a_receiver(project: Project) -> None:
    assert not alert_run_failed(project.home, failed_run())
    assert not project.home.alerts.exists()


@dg.op
def broken() -> None:
    raise dg.Failure("the trainer is gone")


@dg.job(tags=TAGS)
def broken_job() -> None:
    broken()


@dg.job(name="warm_start_job")
def broken_warm_start() -> None:
    broken()


def test_the_sensor_alerts_about_a_failed_run(project: Project, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_ALERT_URL", inbox.url)
    sensor = alert_sensor(PLAIN_NAMES, {broken_job.name}, (), own_instance=True)
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
    with dg.DagsterInstance.ephemeral() as instance:
        result = broken_job.execute_in_process(instance=instance, raise_on_error=False)
        run = instance.get_run_by_id(result.run_id)
        assert run is not None
        context = dg.build_run_status_sensor_context(
            sensor_name="alert_on_run_failure",
            dagster_instance=instance,
            dagster_run=run,
            dagster_event=result.get_run_failure_event(),
        ).for_run_failure()
        sensor(context, project=ProjectResource(home=str(project.home.root)))
    assert [alert["run_id"] for alert in inbox.received] == [result.run_id]


def test_the_driver_alerts_about_a_failed_run(project: Project, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_ALERT_URL", inbox.url)
    result = drive(project, dg.Definitions(jobs=[broken_warm_start]), max_launches=1)
    assert result.error is not None
    (alert,) = inbox.received
    assert alert["run_id"] == result.launched[0].run_id
    assert alert["phase"] == "warm_start_job"


def test_the_next_driver_alerts_about_a_run_whose_driver_died(
    project: Project, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_ALERT_URL", inbox.url)
    dead = f"{os.getpid()}@{time.time() - 86400}"
    with open_instance(project.home) as instance:
        job = defs.resolve_job_def("explore_job")
        run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags={DRIVER_TAG: dead})
    drive(project, dg.Definitions(jobs=[broken_warm_start]), max_launches=0)
    (alert,) = inbox.received
    assert (alert["run_id"], alert["fault"]) == (run.run_id, "orchestration")
    assert alert["cause"] == "the process that drove this run ended before the run did"


@pytest.fixture
def daemon(project: Project, inbox: Inbox) -> Iterator[Callable[[], None]]:
    """A real daemon over the project, told where to post; call it to fail loudly if it has ended."""
    with open_instance(project.home) as instance:
        instance.get_runs_count()
    project.home.config_file.rename(project.home.root / "away.yaml")  # nothing to launch: this is about alerts
    log = project.home.root / "daemon.log"
    workspace = Path(__file__).parents[2] / "workspace.yaml"
    environment = {
        **os.environ,
        "RFT_HOME": str(project.home.root),
        "DAGSTER_HOME": str(project.home.dagster),
        "RFT_ALERT_URL": inbox.url,
        "RFT_SENSOR_INTERVAL_S": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as stream:
        process = psutil.Popen(
            [sys.executable, "-m", "dagster._daemon", "run", "-w", str(workspace)],
            env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def check() -> None:
        assert process.poll() is None, log.read_text()

    yield check
    stop_process(process)
    process.wait(timeout=30)


@pytest.mark.slow
def test_a_real_daemon_alerts_a_failed_run_once(project: Project, inbox: Inbox, daemon: Callable[[], None]) -> None:
    job = defs.resolve_job_def("warm_start_job")
    with open_instance(project.home) as instance:
        _wait_until(lambda: any(state.instigator_data.cursor for state in _sensor_states(instance)), daemon)
        (project.home.root / "away.yaml").rename(project.home.config_file)
        run = instance.create_run_for_job(job, tags=TAGS, status=dg.DagsterRunStatus.STARTED)
        instance.report_run_failed(run, "its process died")
        _wait_until(inbox.arrived.is_set, daemon)
        # the next tick has nothing to add
        before = len(_ticks(instance))
        _wait_until(lambda: len(_ticks(instance)) > before + 1, daemon)
    assert [alert["run_id"] for alert in inbox.received] == [run.run_id]
    assert inbox.received[0]["cause"] == "no answer"


def _sensor_states(instance: dg.DagsterInstance) -> list:
    return [state for state in instance.all_instigator_state() if state.instigator_name == "alert_on_run_failure"]


def _ticks(instance: dg.DagsterInstance) -> list:
    (state,) = _sensor_states(instance)
    return list(instance.get_ticks(state.instigator_origin_id, state.selector_id))


def _wait_until(condition: Callable[[], object], daemon: Callable[[], None], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        daemon()
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)
