"""The public CI workflow: valid, on every supported Python, with the script that everything else runs."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "failed", "ran", "flaky"),
    [
        (0, None, ["all"], ""),
        (1, "test_a.py::test_a", ["all", "failed"], "test_a.py::test_a"),
        (1, None, ["all", "all"], "make test"),  # lint
        (3, "test_a.py::test_a", ["all", "all"], "make test"),  # an error within pytest
        (137, None, ["all", "all"], "make test"),
    ],
)
def test_only_a_suite_that_ran_to_its_end_is_repeated_in_part(
    tmp_path: Path, status: int, failed: str | None, ran: list[str], flaky: str
) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    notes = f"""echo '{{"{failed}": true}}' > {cache / "lastfailed"}""" if failed else ":"
    suite = f"@echo ran $(or $(TESTS),all); if mkdir first 2> /dev/null; then {notes}; exit {status}; fi"
    (tmp_path / "Makefile").write_text(f"test:\n\t{suite}\n")
    script = (REPOSITORY / ".ci" / "run").read_text()
    functions = script[script.index("failures=") : script.index('again="')]
    calls = 'suite test TESTS=failed; echo "flaky ${flaky[*]}"'
    command = ["bash", "-c", f"set -euo pipefail\n{functions}\n{calls}"]
    # Under `make test-slow` these would make this `make` a sub-make, which prints the folders that it enters.
    of_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in of_make}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [*(f"ran {tests}" for tests in ran), f"flaky {flaky}"], done.stderr
