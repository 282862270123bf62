"""Releases (canaries and A/B tests), and the versions that were chosen to serve."""

import sqlalchemy as sa
from alembic import op

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite counts in INTEGER columns only

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create releases and served_versions."""
    op.create_table(
        "releases",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=False),
        sa.Column("candidate_version", sa.Integer(), nullable=False),
        sa.Column("share", sa.Float(), nullable=False),
        sa.Column("sticky", sa.String(16), nullable=False),
        sa.Column("rule", sa.JSON(), nullable=False),
        sa.Column("looks", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
    )
    op.create_index("releases_status", "releases", ["status"])
    op.create_table(
        "served_versions",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("version", sa.Integer()),
        sa.Column("reason", sa.String(), nullable=False),
    )
    op.create_index("calls_variant", "calls", ["variant"])
