"""An index for the calls of a conversation."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add an index on calls.conversation."""
    op.create_index("calls_conversation", "calls", ["conversation", "number"])
