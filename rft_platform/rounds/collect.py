"""Collect stage of an online round: the committed rows of production traffic become the round's rows in the store.

Corrections that no round has taken become the round's demonstrations.
"""

from time import perf_counter

from rft_platform.common.errors import StorageError, UserError
from rft_platform.experience.file_names import round_key
from rft_platform.experience.notes import ASIDE
from rft_platform.rounds.project.code_version import keep_user_code
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, write
from rft_platform.rounds.project.traffic_source import TrafficSource
from rft_platform.rounds.releases.training_start import settle_start


def collect(project: Project, round_number: int) -> Explored:
    """Write the round's rows of production traffic to the store, then mark them as consumed; returns the report.

    The database first records which rows the round takes. So a repeated call after a crash writes the same rows: no row
    is lost, and no row is used by two rounds. Raises StorageError if no row is committed.
    """
    started, traffic = perf_counter(), project.traffic
    if traffic is None:
        raise UserError("this project serves no production traffic: start one with `rft serve`")
    _refuse_rows_of_another_home(project, traffic, round_number)
    taken = traffic.take(round_number)
    rows = taken.rows
    if not rows:
        raise StorageError(
            f"{round_key(round_number)} has no committed rows of production traffic: commit feedback first"
        )
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


def _refuse_rows_of_another_home(project: Project, traffic: TrafficSource, round_number: int) -> None:
    """Raise StorageError if the rows of this round were exported by another project, or by a home that is gone.

    If this home exported the rows, it has the round's rollout files, or its damaged ones in the folder ``aside``.
    """
    store = project.store
    here = bool(store.rollout_files(round_number)) or (store.round_folder(round_number) / ASIDE).is_dir()
    if traffic.is_consumed(round_number) and not here:
        raise StorageError(
            f"the database of production traffic has given its rows of {round_key(round_number)} to another home: each "
            "project needs its own database (buffer.trainer_input.experience_buffer.path), also a project that was "
            "started again in an empty home"
        )
