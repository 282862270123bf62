"""A copied home continues from its own files: neither what it prints nor what it writes names the original."""

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rft_platform.common.files import digest_file
from tests.e2e.conftest import ProjectFolder

#: What is recorded about the past keeps the names of its time.
HISTORY = ("dagster", "logs")
#: Their pages keep text that no row has any more, so the test compares their rows.
DATABASES = ("mlflow.db", "mlflow.db.backup")

pytestmark = pytest.mark.slow


def naming(home: Path, place: str) -> set[str]:
    """The files of a home that contain the name of a place, without its history, MLflow's database and its copy."""
    files = {path.relative_to(home) for path in home.rglob("*") if path.is_file() and path.name not in DATABASES}
    written = [path for path in files if path.parts[0] not in HISTORY]
    return {str(path) for path in written if place.encode() in (home / path).read_bytes()}


def locations(home: Path) -> list[str]:
    """Every location of files in MLflow's database and its copy, except that of the base model, outside the home."""
    queries = (
        "SELECT artifact_location FROM experiments", "SELECT artifact_uri FROM runs",
        "SELECT source FROM model_versions",
        "SELECT storage_location FROM model_versions WHERE storage_location IS NOT NULL",
        "SELECT value FROM model_version_tags WHERE key = 'checkpoint'",
    )  # fmt: skip
    found = []
    for name in DATABASES:
        with closing(sqlite3.connect(home / "mlflow" / name)) as connection:
            found += [row[0] for query in queries for row in connection.execute(query)]
    return found


def digests(folder: Path) -> dict[str, str]:
    """The digest of every file below a folder."""
    return {str(path.relative_to(folder)): digest_file(path) for path in folder.rglob("*") if path.is_file()}


def run_rounds(project: ProjectFolder, rounds: int) -> None:
    project.rft("run", "--config", str(project.config), "--rounds", str(rounds))


def test_a_copied_home_has_no_paths_of_the_original(make_project) -> None:
    project = make_project("copied")
    original, copy = project.home, project.home.with_name("copy of home")
    run_rounds(project, 1)
    project.rft("stop")
    manifest = "checkpoints/small/e2e/global_step_2/manifest.json"
    assert naming(original, f"{original}/") <= {manifest}
    before = digests(original)
    shutil.copytree(original, copy, symlinks=True)
    second = replace(project, home=copy)

    try:
        run_rounds(second, 2)
        printed = second.rft("trace", "r0002", "--verify", "--json").stdout
        assert "damaged" not in second.rft("store", "check").stdout
    finally:
        second.rft("stop", check=False)

    checkpoints = [str(copy / "checkpoints" / "small" / "e2e" / f"global_step_{step}") for step in (4, 2)]
    trace = json.loads(printed)["trainings"]
    assert [training["result"]["checkpoint"] for training in trace] == checkpoints
    assert trace[0]["parent"] == checkpoints[1]
    assert [training["result"]["model_version"] for training in trace] == [2, 1]
    assert f"{original}/" not in printed
    assert naming(copy, f"{original}/") <= {manifest}
    assert not [location for location in locations(copy) if f"{original}/" in location]
    assert digests(original) == before
