"""Runs that a command executes itself have the origin by which Dagster's interface finds their job."""

import sqlite3
from contextlib import closing
from pathlib import Path

import dagster as dg
import psutil
import yaml

from rft_platform.config.home import Home
from rft_platform.jobs.dagster_internals.masked_instance import CODE_LOCATION, MODULE
from rft_platform.jobs.instance import open_instance
from rft_platform.servers import ui_servers


@dg.op
def nothing() -> None:
    """Do nothing."""


@dg.job(name="explore_job")
def in_process() -> None:
    nothing()


def test_a_run_of_a_driver_belongs_to_the_code_location(tmp_path) -> None:
    with open_instance(Home(tmp_path), capture_output=False) as instance:
        result = in_process.execute_in_process(instance=instance)
        found = instance.get_runs(dg.RunsFilter(tags={".dagster/repository": f"__repository__@{CODE_LOCATION}"}))
        assert [run.run_id for run in found] == [result.run_id]
        origin = found[0].remote_job_origin
        assert origin is not None
        assert (origin.job_name, origin.location_name) == ("explore_job", CODE_LOCATION)


def objects(database: Path) -> list[str]:
    """What an event log consists of, without its rows."""
    with closing(sqlite3.connect(database)) as connection:
        made = connection.execute("SELECT type || name || ifnull(sql, '') FROM sqlite_master").fetchall()
        made += connection.execute("SELECT version_num FROM alembic_version").fetchall()
        return [text for (text,) in [*made, *connection.execute("PRAGMA journal_mode").fetchall()]]


def test_connections_stay_open_until_the_driver_ends(tmp_path: Path) -> None:
    def open_logs() -> set[str]:
        return {
            Path(file.path).stem
            for file in psutil.Process().open_files()
            if file.path.endswith(".db") and file.path.startswith(str(tmp_path))
        }

    with open_instance(Home(tmp_path), capture_output=False) as instance:
        runs = [in_process.execute_in_process(instance=instance).run_id for _ in range(6)]
        assert open_logs() == {"runs", "index", *runs[-4:]}
        assert [len(instance.all_logs(run)) > 5 for run in runs] == [True] * 6
    assert open_logs() == set()
    assert not list(tmp_path.rglob("*.db-wal"))
    made = {tuple(sorted(objects(tmp_path / "dagster" / "history" / "runs" / f"{run}.db"))) for run in runs}
    assert len(made) == 1, "each event log has the tables, indexes and revision of Dagster's own"
    with open_instance(Home(tmp_path)) as instance:
        assert instance.get_runs_count(dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS])) == 6


def test_whether_a_table_exists_is_asked_until_it_does(tmp_path: Path) -> None:
    with open_instance(Home(tmp_path), capture_output=False) as instance:
        storage = instance.event_log_storage
        in_process.execute_in_process(instance=instance)
        assert [storage.has_table("later"), storage.has_table("asset_keys")] == [False, True]
        with closing(sqlite3.connect(tmp_path / "dagster" / "history" / "runs" / "index.db")) as connection:
            connection.execute("CREATE TABLE later (number INTEGER)")
        assert storage.has_table("later")


def test_the_origin_names_the_location_of_both_workspace_files(tmp_path: Path) -> None:
    written = ui_servers._workspace(Home(tmp_path))
    for file in (Path(__file__).parents[2] / "workspace.yaml", written):
        (entry,) = yaml.safe_load(file.read_text())["load_from"]
        location = {k: v for k, v in entry["python_module"].items() if k != "working_directory"}
        assert location == {"module_name": MODULE, "location_name": CODE_LOCATION}
