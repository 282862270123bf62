"""What each call did, and an index for figures of the newest traffic."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add calls.action and an index on calls.recorded_at."""
    op.add_column("calls", sa.Column("action", sa.String(16)))
    op.create_index("calls_recorded_at", "calls", ["recorded_at"])
