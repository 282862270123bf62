"""All tables."""

import sqlalchemy as sa
from alembic import op

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite counts in INTEGER columns only

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables of the online service."""
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
        sa.Column("reward", sa.Double()),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("recorded_at", sa.Double(), nullable=False),
        sa.Column("labelled_at", sa.Double()),
        sa.Column("committed_at", sa.Double()),
        sa.Column("consumed_at", sa.Double()),
        sa.Column("batch", sa.Integer()),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("model_call", sa.JSON(), nullable=False),
    )
    op.create_index("calls_msg_id_choice", "calls", ["msg_id", "choice"], unique=True)
    op.create_index("calls_state", "calls", ["state", "number"])
    op.create_index("calls_task", "calls", ["task_id", "state"])
    op.create_index("calls_batch", "calls", ["batch"])
    op.create_index("calls_subject", "calls", ["subject"])
    op.create_index("calls_variant", "calls", ["variant"])
    recent = ["recorded_at", "action", "reward", "labelled_at", "batch", "policy_version"]
    op.create_index("calls_recent", "calls", recent)
    op.create_index("calls_conversation", "calls", ["conversation", "number"])
    op.create_index("calls_tenant", "calls", ["tenant", "state"])
    op.create_table(
        "feedback",
        sa.Column("feedback_id", sa.String(200), primary_key=True),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("tenant", sa.String(200), nullable=False),
        sa.Column("metric", sa.String(100), nullable=False),
        sa.Column("value", sa.Double()),
        sa.Column("comment", sa.String()),
        sa.Column("correction", sa.String()),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("batch", sa.Integer()),
    )
    op.create_table(
        "feedback_calls",
        sa.Column("feedback_id", sa.String(200), sa.ForeignKey("feedback.feedback_id"), primary_key=True),
        sa.Column("number", NUMBER, sa.ForeignKey("calls.number"), primary_key=True),
    )
    op.create_index("feedback_calls_number", "feedback_calls", ["number"])
    op.create_table(
        "batches",
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=False),
        sa.Column("consumed_at", sa.Double()),
    )
    op.create_table(
        "events",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(50), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
    )
    op.create_table(
        "releases",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=False),
        sa.Column("candidate_version", sa.Integer(), nullable=False),
        sa.Column("share", sa.Double(), nullable=False),
        sa.Column("sticky", sa.String(16), nullable=False),
        sa.Column("rule", sa.JSON(), nullable=False),
        sa.Column("looks", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
    )
    op.create_index("releases_status", "releases", ["status"])
    op.create_table(
        "served_versions",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("version", sa.Integer()),
        sa.Column("reason", sa.String(), nullable=False),
    )
    op.create_table(
        "preferences",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("left_call", NUMBER, sa.ForeignKey("calls.number"), nullable=False),
        sa.Column("right_call", NUMBER, sa.ForeignKey("calls.number"), nullable=False),
        sa.Column("picked", sa.String(8), nullable=False),
        sa.Column("comment", sa.String()),
        sa.Column("rater", sa.String(200)),
    )
    op.create_index("preferences_pair", "preferences", ["left_call", "right_call"], unique=True)
    op.create_table(
        "owner",
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("home", sa.String(64), nullable=False),
        sa.Column("project", sa.String(400), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
    )
