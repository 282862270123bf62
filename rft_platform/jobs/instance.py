"""The project's Dagster instance: created on first use, cleaned up after a dead driver.

Its settings are the project's ``dagster.yaml``, created on first use; a file that a user wrote gets the sections that
it lacks. The file also says where Dagster keeps runs, events and schedules: in SQLite in the project's folder, or in
Postgres if ``RFT_DAGSTER_POSTGRES_URL`` is set. The file contains the variable's name and not its value, so that the
password stays in the environment.
"""

import os
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dagster as dg
import yaml

from rft_platform.cluster.local.locks import locked
from rft_platform.common.database_urls import with_time_limits
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.jobs.dagster_internals.masked_instance import load_instance
from rft_platform.jobs.dagster_internals.run_launcher import driver_is_alive, driver_of

#: Sections that the platform adds, each with the section that a user may have written instead.
_NEEDED = {"instance_class": "instance_class", "run_launcher": "run_launcher", "run_queue": "run_coordinator"}

#: Advice for a broken file.
REPAIR_SETTINGS = "correct it, or delete it, and the platform writes its own settings again"

URL = "RFT_DAGSTER_POSTGRES_URL"
#: Appended to ``dagster.yaml`` for Postgres.
_POSTGRES_SECTION = f"""
# Added by the platform: runs, events and schedules are kept in Postgres. Its URL stays in the environment.
storage:
  postgres:
    postgres_url:
      env: {URL}
"""
#: Sections that mean a user has configured the storage.
_STORAGE_SECTIONS = {"storage", "run_storage", "event_log_storage", "schedule_storage"}
#: Names the driver psycopg2, which dagster-postgres installs: SQLAlchemy 2.1 uses psycopg 3 for ``postgresql:``.
_SCHEME = "postgresql+psycopg2"
_FORM = f"{_SCHEME}://USER:PASSWORD@HOST:PORT/NAME"


def shipped_settings() -> str:
    """The file as this version writes it."""
    return resources.files("rft_platform.jobs").joinpath("dagster.yaml").read_text(encoding="utf-8")


def ensure_settings(file: Path) -> None:
    """Create the file, or add the sections that the platform needs to a user's file."""
    shipped = shipped_settings()
    if not file.exists():
        write_text(file, shipped)
        return
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not a text file ({error.reason}): {REPAIR_SETTINGS}") from error
    if text.removesuffix(_POSTGRES_SECTION) == shipped:
        return
    ours, sections = yaml.safe_load(shipped), _sections(file, text)
    added = {name: ours[name] for name, instead in _NEEDED.items() if not {name, instead} & set(sections)}
    if added:
        block = yaml.safe_dump(added, sort_keys=False)
        write_text(file, f"{text.rstrip()}\n\n# Added by the platform: see its own dagster.yaml.\n{block}")


def launches_elsewhere(home: Home) -> bool:
    """Whether ``dagster.yaml`` names a run launcher of another package, such as ``dagster_k8s``.

    Runs of the daemon then start on other machines.
    """
    file = home.dagster / "dagster.yaml"
    if not file.exists():
        return False
    launcher = _sections(file, file.read_text(encoding="utf-8", errors="replace")).get("run_launcher") or {}
    return str(launcher.get("module", "dagster")).partition(".")[0] not in ("dagster", "rft_platform")


def _sections(file: Path, text: str) -> dict[str, Any]:
    try:
        sections = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise UserError(
            f"{file}: {where}{getattr(error, 'problem', None) or 'is not valid YAML'}: {REPAIR_SETTINGS}"
        ) from error
    if not isinstance(sections, dict):
        raise UserError(f"{file}: is not a mapping of sections: {REPAIR_SETTINGS}")
    return sections


def ensure_storage(file: Path) -> None:
    """Update ``dagster.yaml`` to match the environment; a storage configured by the user is kept.

    Raises UserError if the URL is not valid, if the extra ``postgres`` is not installed, or if the project's runs are
    in Postgres and the URL is not set: in SQLite the project would continue without these runs.
    """
    text, url = file.read_text(encoding="utf-8"), os.environ.get(URL, "")
    if not url:
        if URL in text:
            raise UserError(
                f"the runs of this project are stored in Postgres, and {URL} is not set: set it to the database's URL "
                f"({_FORM}), or take the section `storage` out of {file} to "
                "start with an empty SQLite history"
            )
        return
    _check_url(url)
    os.environ[URL] = with_time_limits(url)  # Dagster reads it here and in the processes that this one starts
    if URL not in text and not _STORAGE_SECTIONS & set(yaml.safe_load(text) or {}):
        write_text(file, text.rstrip() + "\n" + _POSTGRES_SECTION)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        sound = parts.scheme == _SCHEME and bool(parts.hostname) and parts.port != 0 and len(parts.path) > 1
    except ValueError:
        sound = False
    if not sound:  # do not repeat the value: it contains a password
        raise UserError(f"{URL} is not a Postgres URL with its driver: expected {_FORM}")
    if find_spec("dagster_postgres") is None:
        raise UserError(f"{URL} is set, and dagster-postgres is not installed: pip install 'rft-platform[postgres]'")


def open_instance(home: Home, capture_output: bool = True) -> dg.DagsterInstance:
    """The instance in ``RFT_HOME/dagster``, created with the platform's settings on first use.

    ``capture_output=False`` is for a driver: the output of the runs in this process goes to the process's standard
    output and is not captured.
    """
    with locked(home.dagster / "instance"):  # two processes that create Dagster's tables at once corrupt them
        ensure_settings(settings := home.dagster / "dagster.yaml")
        ensure_storage(settings)
        try:
            return load_instance(home.dagster, capture_output)
        except dg.DagsterInvalidConfigError as error:
            found = [found.message.split(" Expected: ")[0] for found in error.errors]
            raise UserError(f"{settings}: {'; '.join(found)} {REPAIR_SETTINGS}") from error


def end_orphaned_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark runs whose driver process is gone as failed, and free their pool slots; returns their ids.

    Dagster's run monitoring does so for runs that the daemon launched, but not for runs in a driver's process. The
    slots of runs that are already marked as failed are freed too: a process killed between both steps leaves them.
    """
    open_runs = instance.get_runs(
        dg.RunsFilter(
            statuses=[dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.NOT_STARTED]
        )
    )
    orphans = [run for run in open_runs if is_orphaned(run)]
    for run in orphans:
        instance.report_run_failed(run, "The process that drove this run ended before the run did.")
    _free_slots_of_orphans(instance)
    return [run.run_id for run in orphans]


def _free_slots_of_orphans(instance: dg.DagsterInstance) -> None:
    """Free the pool slots of runs whose driver has ended; a step that waits for such a slot would never start."""
    storage = instance.event_log_storage
    for run_id in storage.get_concurrency_run_ids():
        run = instance.get_run_by_id(run_id)
        if run is None or (run.is_finished and is_orphaned(run)):
            storage.free_concurrency_slots_for_run(run_id)


def is_orphaned(run: dg.DagsterRun) -> bool:
    """Whether the run was executed by a driver process that is gone."""
    driver = driver_of(run)
    return driver is not None and not driver_is_alive(driver)
