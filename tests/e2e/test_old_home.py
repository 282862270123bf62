"""A home that an older version wrote, at another path, is read, traced and continued to the weights that it promised.

``home_of_0_1_0.tar.xz`` holds a project with a model of 11,000 parameters and two rounds, and the weights to which the
version that wrote it continued: ``expected_global_step_6.safetensors``.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

ARCHIVE = Path(__file__).with_name("home_of_0_1_0.tar.xz")
WRITTEN_AT = "/tmp/oldhome/project"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory):
    """The unpacked project; paths in its two configuration files are those of the new place, as a user would write."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    root = folder / "project"
    for file in (root / "rft.yaml", root / "home" / "rft.yaml"):
        file.write_text(file.read_text().replace(WRITTEN_AT, str(root)))
    yield root
    rft(root, "stop")


def rft(project: Path, *arguments: str) -> str:
    """What ``rft`` prints in the project; fails the test if its exit status is not 0."""
    own = {"RFT_HOME": str(project / "home"), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    paths = [str(project), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "rft_platform", *arguments],
        env={**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, f"rft {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_it_is_read_and_traced(project: Path) -> None:
    rounds = json.loads(rft(project, "rounds", "--json"))["rounds"]
    assert [each["round"] for each in rounds if each["round"]] == [1, 2]
    assert "damaged" not in rft(project, "store", "check")
    trace = json.loads(rft(project, "trace", "r0002", "--verify", "--json"))["trainings"]
    assert [training["result"]["model_version"] for training in trace] == [2, 1]
    assert [training["rows_trained"] for training in trace] == [16, 16]
    assert all(training["data_unchanged"] for training in trace)
    assert Path(trace[0]["result"]["checkpoint"]).is_relative_to(project)
    assert trace[0]["parent"] == trace[1]["result"]["checkpoint"]


def test_it_goes_on_to_the_same_weights(project: Path) -> None:
    config = yaml.safe_load((project / "rft.yaml").read_text())
    config["buffer"]["total_steps"] = 3
    (project / "rft.yaml").write_text(yaml.safe_dump(config))
    rft(project, "run", "--config", str(project / "rft.yaml"))
    weights = load_file(project / "home" / "checkpoints" / "small" / "old" / "global_step_6" / "model.safetensors")
    expected = load_file(project / "expected_global_step_6.safetensors")
    assert weights.keys() == expected.keys()
    assert max(abs(weights[name] - expected[name]).max() for name in expected) <= 1e-6
