"""A real Postgres server of the test's own, where the machine has one."""

from collections.abc import Iterator

import pytest

from tests.support.postgres import postgres_server, program


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """URL, with password, of an empty database on a free loopback port."""
    pytest.importorskip("dagster_postgres", reason="needs dagster-postgres: pip install 'rft-platform[postgres]'")
    for name in ("initdb", "pg_ctl"):
        if program(name) is None:
            pytest.skip(f"needs a Postgres server: {name} is neither on the PATH nor below /usr/lib/postgresql")
    with postgres_server() as url:
        yield url
