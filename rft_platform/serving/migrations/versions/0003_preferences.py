"""Preferences of people."""

import sqlalchemy as sa
from alembic import op

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite counts in INTEGER columns only

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create preferences."""
    op.create_table(
        "preferences",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("left_call", NUMBER, sa.ForeignKey("calls.number"), nullable=False),
        sa.Column("right_call", NUMBER, sa.ForeignKey("calls.number"), nullable=False),
        sa.Column("picked", sa.String(8), nullable=False),
        sa.Column("comment", sa.String()),
        sa.Column("rater", sa.String(200)),
    )
    op.create_index("preferences_pair", "preferences", ["left_call", "right_call"], unique=True)
