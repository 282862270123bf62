"""The public CI workflow: valid, on every supported Python, with the script that everything else runs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[2]
WORKFLOW = REPOSITORY / ".github" / "workflows" / "ci.yml"


def test_the_workflow_is_one_that_github_accepts() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_runs_the_same_script_on_every_supported_python() -> None:
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["test"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert (REPOSITORY / ".ci" / "run").stat().st_mode & 0o111
    oldest, beyond = re.findall(
        r"3\.(\d+)", tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"]
    )
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(int(oldest), int(beyond))]
