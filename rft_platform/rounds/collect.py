"""Collect stage of an online round: the committed rows of production traffic become the round's rows in the store.

Corrections that no round has taken become the round's demonstrations.
"""

from time import perf_counter

from rft_platform.common.errors import UserError
from rft_platform.rounds.project.code_version import keep_user_code
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, write
from rft_platform.rounds.releases.training_start import settle_start


def collect(project: Project, round_number: int) -> Explored:
    """Write the round's rows of production traffic to the store, then mark them as consumed; returns the report.

    The database first records which rows the round takes. So a repeated call after a crash writes the same rows: no row
    is lost, and no row is used by two rounds. Raises StorageError if no row is committed.
    """
    started, traffic = perf_counter(), project.traffic
    if traffic is None:
        raise UserError("this project serves no production traffic: start one with `rft serve`")
    taken = traffic.take(round_number)
    rows = taken.rows
    demonstrations = traffic.demonstrations(round_number)
    project.store.write_rollouts(round_number, 0, rows)
    versions = [row.call.policy_version for row in rows if row.call.policy_version is not None]
    parent = settle_start(project, round_number)
    explored = Explored(
        rows=len(rows),
        policy_version=max(versions, default=parent.policy_version),
        policy_round=parent.round,
        weights_digest=parent.weights_digest,
        workflow_code=keep_user_code(project),
        seconds=perf_counter() - started,
        figures={
            "runs": len({row.run_id for row in rows}),
            "tasks": len({row.task_id for row in rows}),
            "subjects": taken.subjects,
            "demonstrations": demonstrations.rows,
            "tokens": sum(len(row.call.response_ids) for row in rows),
            "oldest_policy_version": min(versions, default=parent.policy_version),
        },
    )
    write(project.store, round_number, explored)
    traffic.consume(round_number)
    return explored
