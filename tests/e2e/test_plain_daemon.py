"""Rounds under Dagster's own daemon, which the platform does not patch: slower to begin, with the same result.

CI also runs this file with the newest Dagster that the next release of the platform may meet.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from interface import wait_for

from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BIN = Path(sys.executable).parent


def test_its_sensors_close_all_rounds(make_project) -> None:
    project = make_project("plain-daemon")
    (project.home / "rft.yaml").write_text(project.config.read_text())
    environment = project.environment | {"DAGSTER_HOME": str(project.home / "dagster"), "RFT_RETRY_DELAY_S": "1"}
    workspace = ["-m", "rft_platform.definitions"]

    def run(*command: str) -> None:
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)

    run(sys.executable, "-m", "rft_platform.jobs.init_dagster_home")
    run(str(BIN / "dagster"), "sensor", "start", "--start-all", *workspace)
    log = (project.home / "dagster-daemon.log").open("w")
    with (
        log,
        subprocess.Popen(
            [str(BIN / "dagster-daemon"), "run", *workspace],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as daemon,
    ):
        try:
            report = project.home / "rounds" / "r0002" / "evaluation.json"
            wait_for(report.exists, "round 2 is evaluated", 500)
        finally:
            daemon.terminate()
            daemon.wait(60)
    versions = [project.note(number, "policy")["model_version"] for number in (1, 2)]
    assert versions == ["1", "2"]
    with open_instance(Home(project.home)) as instance:
        assert not [run.job_name for run in instance.get_runs() if run.is_failure]
    assert json.loads(report.read_text())
