"""What a campaign on Ray uses: three raylets, an S3 server behind a proxy that breaks requests, a Postgres server."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.s3.faulty_proxy import FaultyProxy
from tests.support.postgres import postgres_server, program
from tests.support.raylets import Raylets, raylets
from tests.support.s3_server import make_bucket, s3_server, s3_variables

_NODES = 3


@dataclass(frozen=True, slots=True)
class RayPlatform:
    """The running cluster and servers; the variables to use them are set in this process."""

    nodes: Raylets
    proxy: FaultyProxy
    endpoint: str  # of the S3 server itself
    postgres: str | None  # URL of the server's first database; None: this machine has no Postgres

    def bucket(self, name: str) -> str:
        """The URL of a project in a new bucket."""
        return make_bucket(self.endpoint, name)

    def database(self, name: str) -> str | None:
        """The URL of a new database."""
        if self.postgres is None:
            return None
        self.execute(f'CREATE DATABASE "{name}"')
        return self.postgres.removesuffix("postgres") + name

    def execute(self, statement: str) -> int:
        """Execute a statement in the server's first database; returns the number of rows of its result."""
        from sqlalchemy import create_engine, text

        assert self.postgres is not None
        engine = create_engine(self.postgres, isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                result = connection.execute(text(statement))
                return len(result.fetchall()) if result.returns_rows else 0
        finally:
            engine.dispose()


@contextmanager
def ray_platform(seed: int) -> Iterator[RayPlatform]:
    """Start everything; it ends with the block. Without Postgres's programs, Dagster's storage stays in SQLite."""
    with ExitStack() as stack:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request to S3
        nodes = stack.enter_context(raylets(_NODES))
        endpoint = stack.enter_context(s3_server())
        proxy = FaultyProxy(endpoint, seed)
        url = stack.enter_context(proxy.running())
        os.environ.update(s3_variables(url))
        postgres = stack.enter_context(postgres_server()) if program("pg_ctl") and program("initdb") else None
        yield RayPlatform(nodes, proxy, endpoint, postgres)
