"""The project that a database belongs to."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Create owner."""
    op.create_table(
        "owner",
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("home", sa.String(64), nullable=False),
        sa.Column("project", sa.String(400), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
    )
