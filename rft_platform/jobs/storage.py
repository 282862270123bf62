"""Storage of Dagster's runs, events and schedules: SQLite in the project's folder, or Postgres.

``RFT_DAGSTER_POSTGRES_URL`` selects Postgres. ``dagster.yaml`` contains the variable's name and not its value, so that
the password stays in the environment.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from rft_platform.errors import UserError
from rft_platform.files import write_text

URL = "RFT_DAGSTER_POSTGRES_URL"
#: Text appended to ``dagster.yaml``.
BLOCK = f"""
# Added by the platform: runs, events and schedules are kept in Postgres. Its URL stays in the environment.
storage:
  postgres:
    postgres_url:
      env: {URL}
"""
#: Sections that mean a user has configured the storage.
_SETTLED = {"storage", "run_storage", "event_log_storage", "schedule_storage"}
#: With the driver: SQLAlchemy 2.1 uses psycopg 3 for a plain ``postgresql:``, dagster-postgres installs psycopg2.
_SCHEME = "postgresql+psycopg2"
_FORM = f"{_SCHEME}://USER:PASSWORD@HOST:PORT/NAME"


def ensure_storage(file: Path) -> None:
    """Update ``dagster.yaml`` to match the environment; a storage configured by the user is kept.

    Raises UserError for an invalid URL, if the extra ``postgres`` is not installed, and if a project whose runs are in
    Postgres is opened without the URL: continuing in SQLite would lose them.
    """
    text, url = file.read_text(encoding="utf-8"), os.environ.get(URL, "")
    if not url:
        if URL in text:
            raise UserError(
                f"the runs of this project are kept in Postgres, and {URL} is not set: set it to the database's URL "
                f"({_FORM}), or take the section `storage` out of {file} to begin "
                "with an empty SQLite history"
            )
        return
    _check(url)
    if URL not in text and not _SETTLED & set(yaml.safe_load(text) or {}):
        write_text(file, text.rstrip() + "\n" + BLOCK)


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        sound = parts.scheme == _SCHEME and bool(parts.hostname) and parts.port != 0 and len(parts.path) > 1
    except ValueError:
        sound = False
    if not sound:  # do not repeat the value: it contains a password
        raise UserError(f"{URL} is not a Postgres URL with its driver: expected {_FORM}")
    if find_spec("dagster_postgres") is None:
        raise UserError(f"{URL} is set, and dagster-postgres is not installed: pip install 'rft-platform[postgres]'")
