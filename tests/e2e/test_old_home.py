"""A home that was moved or copied names its own files, also one that an older version wrote with absolute paths.

``home_of_0_1_0.tar.xz`` holds a project with a model of 11,000 parameters and two rounds, and the weights to which the
version that wrote it continued: ``expected_global_step_6.safetensors``.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

from rft_platform.common.files import digest_file
from rft_platform.model_registry.sqlite_reader import read_versions

ARCHIVE = Path(__file__).with_name("home_of_0_1_0.tar.xz")
WRITTEN_AT = "/tmp/oldhome/project"
#: What is recorded about the past keeps the names of its time.
HISTORY = ("dagster", "logs")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The unpacked project; paths in its two configuration files are those of the new place, as a user would write."""
    root = unpacked(tmp_path_factory.mktemp("old"))
    config = root / "home" / "rft.yaml"
    config.write_text(config.read_text().replace(WRITTEN_AT, str(root)))
    yield root
    rft(root / "home", "stop")


def unpacked(folder: Path) -> Path:
    """The project of the archive, with its own configuration file corrected and Dagster's settings of this version."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    root = folder / "project"
    (root / "home" / "dagster" / "dagster.yaml").unlink()  # it names classes of its time
    (root / "rft.yaml").write_text((root / "rft.yaml").read_text().replace(WRITTEN_AT, str(root)))
    return root


def rft(home: Path, *arguments: str) -> str:
    """What ``rft`` prints for a home in its project; fails the test if its exit status is not 0."""
    own = {"RFT_HOME": str(home), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    paths = [str(home.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "rft_platform", *arguments],
        env={**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"rft {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_rounds(home: Path, rounds: int) -> None:
    """Continue the project in the folder of ``home`` to this number of rounds."""
    file = home.parent / "rft.yaml"
    config = yaml.safe_load(file.read_text())
    config["buffer"]["total_steps"] = rounds
    file.write_text(yaml.safe_dump(config))
    rft(home, "run", "--config", str(file))


def naming(home: Path, place: str) -> set[str]:
    """The files of a home that contain the name of a place, without its history and MLflow's database."""
    files = {path.relative_to(home) for path in home.rglob("*") if path.is_file() and path.name != "mlflow.db"}
    written = [path for path in files if path.parts[0] not in HISTORY]
    return {str(path) for path in written if place.encode() in (home / path).read_bytes()}


def locations(home: Path) -> list[str]:
    """Every location of files in MLflow's database, except that of the base model, which is not in the home."""
    queries = (
        "SELECT artifact_location FROM experiments", "SELECT artifact_uri FROM runs",
        "SELECT source FROM model_versions",
        "SELECT storage_location FROM model_versions WHERE storage_location IS NOT NULL",
        "SELECT value FROM model_version_tags WHERE key = 'checkpoint'",
    )  # fmt: skip
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as connection:
        return [row[0] for query in queries for row in connection.execute(query)]


def digests(folder: Path) -> dict[str, str]:
    """The digest of every file below a folder."""
    return {str(path.relative_to(folder)): digest_file(path) for path in folder.rglob("*") if path.is_file()}


def test_an_old_home_is_read_and_traced(project: Path) -> None:
    home = project / "home"
    rounds = json.loads(rft(home, "rounds", "--json"))["rounds"]
    assert [each["round"] for each in rounds if each["round"]] == [1, 2]
    assert all(Path(each["checkpoint"]).is_relative_to(home) for each in rounds if each["round"])
    assert "damaged" not in rft(home, "store", "check")
    printed = rft(home, "trace", "r0002", "--verify", "--json")
    trace = json.loads(printed)["trainings"]
    assert [training["result"]["model_version"] for training in trace] == [2, 1]
    assert [training["rows_trained"] for training in trace] == [16, 16]
    assert all(training["data_unchanged"] for training in trace)
    assert Path(trace[0]["result"]["checkpoint"]).is_relative_to(home)
    assert trace[0]["parent"] == trace[1]["result"]["checkpoint"]
    assert WRITTEN_AT not in printed
    by_name = json.loads(rft(home, "trace", "models:/small-old/2", "--json"))
    assert by_name["trainings"][0]["result"] == trace[0]["result"]


def test_an_old_home_is_continued_to_the_same_weights(project: Path) -> None:
    home = project / "home"
    before = naming(home, WRITTEN_AT)
    run_rounds(home, 3)
    weights = load_file(home / "checkpoints" / "small" / "old" / "global_step_6" / "model.safetensors")
    expected = load_file(project / "expected_global_step_6.safetensors")
    assert weights.keys() == expected.keys()
    assert max(abs(weights[name] - expected[name]).max() for name in expected) <= 1e-6
    assert naming(home, WRITTEN_AT) <= before, "a file that the continued project wrote names the old place"
    assert "rft.yaml" not in before
    assert not [location for location in locations(home) if WRITTEN_AT in location]
    artifacts = home / "mlflow" / "artifacts" / "small"
    assert [folder.name for folder in sorted(artifacts.glob("*/artifacts/round-*"))][-1] == "round-0003"


def test_the_models_of_an_old_home_are_those_of_this_home(project: Path) -> None:
    home = project / "home"
    versions = read_versions(f"sqlite:///{home / 'mlflow' / 'mlflow.db'}", "small-old")
    assert versions is not None
    checkpoints = home / "checkpoints" / "small" / "old"
    assert [(each.version, each.folder) for each in versions] == [
        (number, checkpoints / f"global_step_{2 * number}") for number in (1, 2, 3)
    ]
    evaluations = {n: json.loads((home / "rounds" / f"r{n:04d}" / "evaluation.json").read_text()) for n in (1, 2, 3)}
    promoted = [number for number, note in evaluations.items() if note["promoted"]]
    assert [each.version for each in versions if "champion" in each.aliases] == promoted[-1:]
    assert len(promoted) > 1
    rebuilt = json.loads(rft(home, "models", "rebuild", "--json"))
    assert all(not each["registered"] and not each["renumbered"] for each in rebuilt)
    trace = json.loads(rft(home, "trace", "models:/small-old@champion", "--json"))["trainings"]
    assert trace[0]["result"]["checkpoint"] == str(checkpoints / f"global_step_{2 * promoted[-1]}")
    rft(home, "models", "rollback")
    back = json.loads(rft(home, "trace", "models:/small-old@champion", "--json"))["trainings"]
    assert back[0]["result"]["model_version"] == promoted[-2]


def test_a_copied_home_names_only_itself(tmp_path: Path) -> None:
    root = unpacked(tmp_path)
    shutil.rmtree(root / "home")
    original, copy = root / "home", root / "copy of home"
    run_rounds(original, 1)
    rft(original, "stop")
    assert naming(original, str(original)) <= {"checkpoints/small/old/global_step_2/manifest.json"}
    before = digests(original)
    subprocess.run(["cp", "-r", original, copy], check=True)

    try:
        run_rounds(copy, 2)
        printed = rft(copy, "trace", "r0002", "--verify", "--json")
        assert "damaged" not in rft(copy, "store", "check")
    finally:
        rft(copy, "stop")

    first, second = (copy / "checkpoints" / "small" / "old" / f"global_step_{step}" for step in (2, 4))
    trace = json.loads(printed)["trainings"]
    assert [training["result"]["checkpoint"] for training in trace] == [str(second), str(first)]
    assert trace[0]["parent"] == str(first)
    assert [training["result"]["model_version"] for training in trace] == [2, 1]
    assert f"{original}/" not in printed
    assert naming(copy, f"{original}/") <= {"checkpoints/small/old/global_step_2/manifest.json"}
    assert not [location for location in locations(copy) if f"{original}/" in location]
    assert digests(original) == before
