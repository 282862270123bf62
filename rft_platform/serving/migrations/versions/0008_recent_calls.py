"""An index that holds all that the figures of the newest traffic read, so that they read no recorded texts."""

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Replace the index on calls.recorded_at by a wider one."""
    op.drop_index("calls_recorded_at", "calls")
    columns = ["recorded_at", "action", "reward", "labelled_at", "batch", "policy_version"]
    op.create_index("calls_recent", "calls", columns)
