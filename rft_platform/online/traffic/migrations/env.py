"""Alembic's entry: migrates the connection that ``open_database`` passes."""

from alembic import context

from rft_platform.online.traffic.database import VERSION_TABLE, Base

connection = context.config.attributes["connection"]
context.configure(
    connection=connection, target_metadata=Base.metadata, render_as_batch=True, version_table=VERSION_TABLE
)
context.run_migrations()
