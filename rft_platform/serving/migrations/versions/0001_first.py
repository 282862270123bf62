"""The first tables."""

import sqlalchemy as sa
from alembic import op

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite counts in INTEGER columns only

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create calls, feedback, batches and events."""
    op.create_table(
        "calls",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("msg_id", sa.String(200), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(200), nullable=False),
        sa.Column("subject", sa.String(200)),
        sa.Column("conversation", sa.String(200)),
        sa.Column("task_id", sa.String(200)),
        sa.Column("run_id", sa.String(200)),
        sa.Column("variant", sa.String(100)),
        sa.Column("policy_version", sa.Integer()),
        sa.Column("reward", sa.Float()),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("recorded_at", sa.Float(), nullable=False),
        sa.Column("labelled_at", sa.Float()),
        sa.Column("committed_at", sa.Float()),
        sa.Column("consumed_at", sa.Float()),
        sa.Column("batch", sa.Integer()),
        sa.Column("model_call", sa.JSON(), nullable=False),
    )
    op.create_index("calls_msg_id_choice", "calls", ["msg_id", "choice"], unique=True)
    op.create_index("calls_state", "calls", ["state", "number"])
    op.create_index("calls_task", "calls", ["task_id", "state"])
    op.create_index("calls_batch", "calls", ["batch"])
    op.create_index("calls_subject", "calls", ["subject"])
    op.create_table(
        "feedback",
        sa.Column("feedback_id", sa.String(200), primary_key=True),
        sa.Column("received_at", sa.Float(), nullable=False),
        sa.Column("tenant", sa.String(200), nullable=False),
        sa.Column("metric", sa.String(100), nullable=False),
        sa.Column("value", sa.Float()),
        sa.Column("comment", sa.String()),
        sa.Column("correction", sa.String()),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
    )
    op.create_table(
        "feedback_calls",
        sa.Column("feedback_id", sa.String(200), sa.ForeignKey("feedback.feedback_id"), primary_key=True),
        sa.Column("number", NUMBER, sa.ForeignKey("calls.number"), primary_key=True),
    )
    op.create_table(
        "batches",
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("settled_at", sa.Float(), nullable=False),
        sa.Column("consumed_at", sa.Float()),
    )
    op.create_table(
        "events",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(50), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
    )
