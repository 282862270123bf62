"""The round whose demonstrations hold a correction."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add feedback.batch."""
    op.add_column("feedback", sa.Column("batch", sa.Integer()))
