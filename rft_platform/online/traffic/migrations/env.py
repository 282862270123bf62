"""Alembic's entry: migrates the connection that ``open_database`` passes."""

from alembic import context

from rft_platform.online.traffic.database import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
context.run_migrations()
