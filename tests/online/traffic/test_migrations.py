"""The tables that Alembic creates are those of the models."""

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text

from rft_platform.online.releases import store  # noqa: F401 (its tables)
from rft_platform.online.traffic import preferences  # noqa: F401 (its tables)
from rft_platform.online.traffic.database import VERSION_TABLE, Base, open_database


def test_the_migrations_create_the_tables_of_the_models(database_url: str) -> None:
    for _ in range(2):  # the second time there is nothing to do
        engine = open_database(database_url)
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
            assert compare_metadata(context, Base.metadata) == []
        engine.dispose()


def test_the_database_may_hold_the_tables_of_another_program_that_uses_alembic(database_url: str) -> None:
    other = create_engine(database_url)
    with other.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('29b539ebc72a')"))
    open_database(database_url).dispose()
    with other.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == ["29b539ebc72a"]
    other.dispose()
