"""Databases of the online service: SQLite, and an empty one of a PostgreSQL server where the machine has one."""

import itertools
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url

from tests.deploy.conftest import postgres  # noqa: F401

_NUMBERS = itertools.count()


class Clock:
    """A clock that a test sets."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'traffic.db'}"
    server = make_url(request.getfixturevalue("postgres"))
    name = f"traffic{next(_NUMBERS)}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    return server.set(database=name).render_as_string(hide_password=False)
