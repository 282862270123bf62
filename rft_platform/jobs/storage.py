"""Where Dagster keeps runs, events and schedules: SQLite below the project's folder, or Postgres.

``RFT_DAGSTER_POSTGRES_URL`` decides. ``dagster.yaml`` names the variable and never its value, so that the password
stays in the environment.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from rft_platform.errors import UserError
from rft_platform.files import write_text

URL = "RFT_DAGSTER_POSTGRES_URL"
#: What is appended to ``dagster.yaml``.
BLOCK = f"""
# Added by the platform: runs, events and schedules are kept in Postgres. Its URL stays in the environment.
storage:
  postgres:
    postgres_url:
      env: {URL}
"""
#: Sections by which somebody has settled the storage by hand.
_SETTLED = {"storage", "run_storage", "event_log_storage", "schedule_storage"}
#: With the driver: SQLAlchemy 2.1 takes a plain ``postgresql:`` for psycopg 3, and dagster-postgres brings psycopg2.
_SCHEME = "postgresql+psycopg2"
_FORM = f"{_SCHEME}://USER:PASSWORD@HOST:PORT/NAME"


def ensure_storage(file: Path) -> None:
    """Bring ``dagster.yaml`` in line with the environment; a storage that was settled by hand stays as it is.

    Raises UserError for a URL that cannot be one, where the extra ``postgres`` is not installed, and where a project
    whose runs are in Postgres is opened without the URL: going on in SQLite would forget them.
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
    if not sound:  # the value is not repeated: it holds a password
        raise UserError(f"{URL} is not a Postgres URL with its driver: expected {_FORM}")
    if find_spec("dagster_postgres") is None:
        raise UserError(f"{URL} is set, and dagster-postgres is not installed: pip install 'rft-platform[postgres]'")
