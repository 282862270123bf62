"""The tables that Alembic creates are those of the models."""

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from rft_platform.online.releases import store  # noqa: F401 (its tables)
from rft_platform.online.traffic import preferences  # noqa: F401 (its tables)
from rft_platform.online.traffic.database import Base, open_database


def test_the_migrations_create_the_tables_of_the_models(database_url: str) -> None:
    for _ in range(2):  # the second time there is nothing to do
        engine = open_database(database_url)
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        engine.dispose()
