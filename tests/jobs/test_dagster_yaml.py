"""``dagster.yaml`` of a home: it is created, and a file of the user gets the sections that it lacks."""

import subprocess
import sys

import dagster as dg
import pytest
import yaml

from rft_platform.common.errors import RftError, UserError
from rft_platform.config.home import Home
from rft_platform.jobs import dagster_yaml
from rft_platform.jobs.dagster_internals.daemon_patches import shorten_sensor_loop
from rft_platform.jobs.dagster_internals.run_launcher import WatchedRunLauncher
from rft_platform.jobs.dagster_yaml import ensure_settings, shipped_settings
from rft_platform.jobs.instance import open_instance
from rft_platform.jobs.sensor_interval import INTERVAL, sensor_interval_s


def test_a_fresh_file_is_ours_and_stays(tmp_path):
    file = tmp_path / "dagster.yaml"
    ensure_settings(file)
    written = file.stat().st_mtime_ns
    ensure_settings(file)
    assert file.read_text() == shipped_settings()
    assert file.stat().st_mtime_ns == written


def test_the_file_of_a_project_on_postgres_stays(tmp_path, monkeypatch):
    file = tmp_path / "dagster.yaml"
    monkeypatch.setattr(dagster_yaml, "_check_url", lambda url: None)  # the driver may not be installed
    monkeypatch.setenv(dagster_yaml.URL, "postgresql+psycopg2://rft:secret@127.0.0.1/none")
    for _ in range(2):
        ensure_settings(file)
        dagster_yaml.ensure_storage(file)
        assert yaml.safe_load(file.read_text()) == {
            **yaml.safe_load(shipped_settings()),
            "storage": {"postgres": {"postgres_url": {"env": dagster_yaml.URL}}},
        }


def test_an_edited_file_keeps_what_it_says_and_gets_what_it_lacks(tmp_path):
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


def test_the_interval_of_the_sensors_is_ten_seconds_or_as_the_environment_says(monkeypatch):
    monkeypatch.delenv(INTERVAL, raising=False)
    assert sensor_interval_s() == 10
    monkeypatch.setenv(INTERVAL, "2")
    assert sensor_interval_s() == 2
    for wrong in ("0", "-1", "1.5", "soon"):
        monkeypatch.setenv(INTERVAL, wrong)
        with pytest.raises(UserError, match=wrong):
            sensor_interval_s()


_SET_BACK = """
import types
from dagster._core.scheduler.instigation import SensorInstigatorData
from dagster._daemon import sensor
from rft_platform.jobs.dagster_internals.daemon_patches import shorten_sensor_loop
import time
shorten_sensor_loop(sensor, 2)
assert sensor.MIN_INTERVAL_LOOP_TIME == 2
def state(ago):
    data = SensorInstigatorData(min_interval=30, last_tick_timestamp=time.time() - ago)
    return types.SimpleNamespace(instigator_data=data)
due = types.SimpleNamespace(min_interval_seconds=30)
print([sensor.is_under_min_interval(state(ago), due) for ago in (1, 60, -3600)])
"""


@pytest.mark.slow
def test_a_clock_that_was_set_back_does_not_hold_the_sensors_up():
    """A last tick an hour ahead: Dagster alone would wait for that hour."""
    done = subprocess.run([sys.executable, "-c", _SET_BACK], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True, False, False]"


def test_a_dagster_that_keeps_its_settings_elsewhere_is_named():
    with pytest.raises(RftError, match="MIN_INTERVAL_LOOP_TIME"):
        shorten_sensor_loop(dg, 1)
