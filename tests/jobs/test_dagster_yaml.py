"""``dagster.yaml`` of a home: written if it is missing, completed if it was edited."""

import dagster as dg
import pytest
import yaml
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.definitions import defs
from rft_platform.jobs import instance as settings_module
from rft_platform.jobs.dagster_internals.masked_instance import job_origin
from rft_platform.jobs.dagster_internals.run_launcher import WatchedRunLauncher
from rft_platform.jobs.instance import URL, ensure_settings, ensure_storage, open_instance, shipped_settings
from rft_platform.jobs.sensor_interval import INTERVAL, sensor_interval_s


def test_a_new_file_has_the_platforms_settings_and_is_kept(tmp_path):
    file = tmp_path / "dagster.yaml"
    ensure_settings(file)
    written = file.stat().st_mtime_ns
    ensure_settings(file)
    assert file.read_text() == shipped_settings()
    assert file.stat().st_mtime_ns == written


def test_a_file_with_the_section_for_postgres_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(settings_module, "_check_url", lambda url: None)  # the driver may not be installed
    monkeypatch.setenv(URL, "postgresql+psycopg2://rft:secret@127.0.0.1/none")
    file = tmp_path / "dagster.yaml"
    ensure_settings(file)
    ensure_storage(file)
    written = file.stat().st_mtime_ns
    ensure_settings(file)
    ensure_storage(file)
    assert file.stat().st_mtime_ns == written
    assert yaml.safe_load(file.read_text()) == {
        **yaml.safe_load(shipped_settings()),
        "storage": {"postgres": {"postgres_url": {"env": URL}}},
    }


def test_an_edited_file_keeps_its_settings_and_gets_missing_ones(tmp_path):
    home = Home(tmp_path)
    file = home.dagster / "dagster.yaml"
    file.parent.mkdir()
    file.write_text("# mine\nconcurrency:\n  runs:\n    max_concurrent_runs: 7\nrun_monitoring:\n  enabled: true\n")
    ensure_settings(file)
    ensure_settings(file)
    told = yaml.safe_load(file.read_text())
    assert file.read_text().startswith("# mine\n")
    assert told["concurrency"] == {"runs": {"max_concurrent_runs": 7}}
    assert told["run_launcher"]["class"] == "WatchedRunLauncher"
    with open_instance(home) as instance:
        assert isinstance(instance.run_launcher, WatchedRunLauncher)
        assert instance.get_concurrency_config().run_queue_config.max_concurrent_runs == 7


def test_another_launcher_and_coordinator_stay(tmp_path):
    file = tmp_path / "dagster.yaml"
    chosen = {
        "run_launcher": {"module": "dagster", "class": "DefaultRunLauncher"},
        "run_coordinator": {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"},
        "instance_class": {"module": "rft_platform.jobs.dagster_internals.masked_instance", "class": "MaskedInstance"},
    }
    file.write_text(yaml.safe_dump(chosen))
    ensure_settings(file)
    assert yaml.safe_load(file.read_text()) == chosen


def test_of_two_runs_of_a_job_the_later_waits_in_the_queue(tmp_path):
    explore, sync = defs.resolve_job_def("explore_job"), defs.resolve_job_def("sync_round_job")
    with open_instance(Home(tmp_path)) as instance:

        def queue(job: dg.JobDefinition) -> dg.DagsterRun:
            return instance.create_run_for_job(
                job, status=dg.DagsterRunStatus.QUEUED, tags=job.run_tags, remote_job_origin=job_origin(job.name)
            )

        def starting() -> list[str]:
            daemon = QueuedRunCoordinatorDaemon(interval_seconds=1)
            runs = daemon._get_runs_to_dequeue(instance, instance.get_concurrency_config(), None)
            return [run.run_id for run in runs]

        first, later, other = queue(explore), queue(explore), queue(sync)
        assert starting() == [first.run_id, other.run_id]
        instance.report_run_failed(first)
        assert starting() == [later.run_id, other.run_id]


def test_the_sensor_interval_is_ten_seconds_or_from_the_environment(monkeypatch):
    monkeypatch.delenv(INTERVAL, raising=False)
    assert sensor_interval_s() == 10
    monkeypatch.setenv(INTERVAL, "2")
    assert sensor_interval_s() == 2
    for wrong in ("0", "-1", "1.5", "soon"):
        monkeypatch.setenv(INTERVAL, wrong)
        with pytest.raises(UserError, match=wrong):
            sensor_interval_s()
