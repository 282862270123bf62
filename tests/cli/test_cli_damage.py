"""Damaged databases and settings, and file systems that fail, end a command in one line that names the file."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from chaos.syscall_faults import SyscallFault, injecting, strikes
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.common.sqlite_files import damage_of_database, damaged_databases, databases
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.definitions import defs
from rft_platform.jobs.instance import open_instance
from rft_platform.judging.judge_context import AnswerStore
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, Judged, Policy, RoundEvaluation, publish, write
from rft_platform.run import start
from rft_platform.run.run_cost import drive_costs, recorded_cost
from tests.support.ports import free_port
from tests.support.records import trained

Rft = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with every kind of database: Dagster's with a run in them, the judges' answers."""
    home = Home(tmp_path_factory.mktemp("made") / "home")
    with open_instance(home) as instance:
        run = instance.create_run_for_job(defs.resolve_job_def("warm_start_job"))
        instance.report_engine_event("began", run)
        instance.report_run_failed(run)
    AnswerStore(home.root / "judging" / "answers.sqlite").keep("key", "model", "answer")
    return home.root


@pytest.fixture
def project(made: Path, home: Home, write_config: Callable[..., Path], with_mlflow: Callable[[Path], None]) -> Home:
    """A project with all of its databases."""
    shutil.copytree(made, home.root)
    with_mlflow(home.root)
    start.write_config(home, load_config(write_config()))
    return home


@pytest.fixture
def run(project: Home, tmp_path: Path) -> Rft:
    """Run a command as its own process, with further environment variables."""

    def call(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rft_platform", *command],
            env={**os.environ, "RFT_HOME": str(project.root), **environment},
            capture_output=True, text=True, timeout=240, cwd=tmp_path,
        )  # fmt: skip

    return call


def noise(path: Path) -> None:
    """Eight kB of noise over the header."""
    with path.open("r+b") as stream:
        stream.write(os.urandom(8192))


def flip_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    """The file ends amid its second half."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 + 100])


DATABASES = ("dagster/history/runs.db", "dagster/history/runs/index.db", "mlflow/mlflow.db", "judging/answers.sqlite")


@pytest.mark.parametrize("harm", [noise, flip_header, cut])
@pytest.mark.parametrize("name", DATABASES)
def test_damage_is_found_with_its_remedy(project: Home, name: str, harm: Callable[[Path], None]) -> None:
    assert list(damaged_databases(project.root, thorough=True)) == []
    assert {str(path.relative_to(project.root)) for path in databases(project.root)} >= set(DATABASES)
    harm(project.root / name)
    (found,) = damaged_databases(project.root, thorough=True)
    assert found.path == project.root / name
    assert "move it away" in found.remedy


def test_a_database_of_a_run_is_one_of_them(project: Home) -> None:
    of_runs = [path for path in databases(project.root) if path.parent.name == "runs" and path.stem != "index"]
    assert of_runs
    noise(of_runs[0])
    assert damage_of_database(of_runs[0]) == "file is not a database"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "command"),
    [
        (DATABASES[0], ("rounds",)),
        (DATABASES[0], ("run", "--config", "rft.yaml")),
        (DATABASES[0], ("ui", "--port", str(free_port()), "--mlflow-port", str(free_port()))),
        (DATABASES[1], ("run", "--config", "rft.yaml")),  # `rft rounds` asks it nothing
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_damaged_history_is_named_in_one_line(project: Home, run: Rft, command: tuple[str, ...], name: str) -> None:
    noise(project.root / name)
    assert_one_line(run(*command), 1, f"{project.root / name} is damaged (file is not a database): move it away")


@pytest.mark.slow
def test_a_damaged_registry_is_named_in_one_line(project: Home, run: Rft) -> None:
    database = project.mlflow / "mlflow.db"
    noise(database)
    assert_one_line(
        run("trace", "models:/sums-one@champion"), 1, f"{database} is damaged (file is not a database): move it"
    )
    assert "copy mlflow.db.backup" in run("models", "rollback").stderr
    found = run("doctor")
    assert found.returncode == 1
    assert f"{database} is damaged" in found.stdout
    assert re.search(r"database +[3-9] can be read", found.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["run_queue: [\n", "- a list\n", "run_queue:\n  no_such_setting: 3\n"], ids=str)
def test_broken_settings_of_dagster_are_named_in_one_line(project: Home, run: Rft, text: str) -> None:
    file = project.dagster / "dagster.yaml"
    file.write_text(text)
    assert_one_line(run("rounds"), 2, f"{file}: ", "or delete it, and the platform writes its own settings again")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        (SyscallFault("flock", "ENOLCK", path="driver.lock"), 1, "No locks available: the file system has no locks"),
        (SyscallFault("rename", "EXDEV", path="rft.yaml"), 1, "rft.yaml: Invalid cross-device link: put RFT_HOME"),
        (SyscallFault("rename", "ESTALE", path="rft.yaml"), 1, "rft.yaml: Stale file handle: the network file system"),
        (SyscallFault("fsync", "EIO", path="rft.yaml"), 1, "rft.yaml: Input/output error: the disk or its network"),
        (SyscallFault("rename", "ENOSPC", path="rft.yaml"), 2, "rft.yaml: no space left on the disk"),
    ],
    ids=lambda value: f"{value.call}-{value.error}" if isinstance(value, SyscallFault) else "",
)
def test_a_failing_file_system_is_named_in_one_line(
    run: Rft, tmp_path: Path, fault_library: Path, fault: SyscallFault, code: int, line: str
) -> None:
    log = tmp_path / "strikes"
    done = run("run", "--config", "rft.yaml", **injecting(fault_library, [fault], log))
    assert strikes(log)
    assert_one_line(done, code, line)


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr, done.stderr
    assert len(lines) == 1, done.stderr
    assert all(part in lines[0] for part in parts), lines
    assert done.returncode == code


@pytest.mark.parametrize("text", ["[{", '{"started_at": 1}', '[{"unknown": 1}]', "[3]"], ids=str)
def test_a_broken_record_of_costs_stops_nothing(
    project: Home, rft: Callable[..., Result], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = project.logs / "drives.json"
    write_text(file, text)
    assert rft("rounds").exit_code == 0
    with recorded_cost(project):
        pass
    assert len(drive_costs(project)) == 1
    assert file.with_name("drives.json.damaged").read_text() == text
    assert f"{file} cannot be read" in caplog.text


def test_costs_that_cannot_be_written_do_not_hide_what_failed(project: Home, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(project.logs, ignore_errors=True)
    project.logs.write_text("a file where the folder should be")
    with pytest.raises(UserError, match="what failed"), recorded_cost(project):
        raise UserError("what failed")
    assert "the cost of this run was not recorded" in caplog.text


def test_rounds_are_shown_of_notes_without_seconds(project: Home, rft: Callable[..., Result]) -> None:
    store = Project.open(project).store
    for part in (Explored(rows=1), Judged(rows=1), trained(), RoundEvaluation()):
        write(store, 1, part)
    publish(store, Policy("/checkpoints/1", 1, "digest", 1))
    done = rft("rounds")
    assert (done.exit_code, done.exception) == (0, None)
    assert "r0001" in done.stdout
