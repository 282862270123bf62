"""Questions to the rows of all rounds, answered by DuckDB over the Parquet files where they lie."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from rft_platform.errors import StorageError
from rft_platform.experience.schema import JUDGED_SCHEMA, ROLLOUT_SCHEMA
from rft_platform.experience.store import ExperienceStore
from rft_platform.files import read_json

#: One row a checkpoint; ``manifest`` is the whole document, for ``json_extract``.
CHECKPOINT_SCHEMA = pa.schema(
    [
        ("checkpoint", pa.string()),
        ("round", pa.int32()),
        ("policy_version", pa.int64()),
        ("judge_version", pa.string()),
        ("manifest", pa.string()),
    ]
)


def connect(store: ExperienceStore, checkpoints_root: Path | None = None) -> duckdb.DuckDBPyConnection:
    """An in-memory connection with these views, of the files that lie there now (without any, they are empty):

    - ``rollouts``: every rollout row;
    - ``judgements``: the rows of every judge version; ``judged``: those of the judgement in force of each round;
    - ``experiences``: rollouts with their judgement in force, null before there is one;
    - ``checkpoints``: one row a ``manifest.json`` below ``checkpoints_root``.
    """
    connection = duckdb.connect(":memory:")
    rounds = store.rounds()
    rollouts = [path for number in rounds for path in store.rollout_files(number)]
    judgements = [path for number in rounds for path in store.judged_files(number)]
    in_force = [path for number in rounds if (path := store.judged_file(number)) is not None]
    _create_view(connection, "rollouts", rollouts, ROLLOUT_SCHEMA)
    _create_view(connection, "judgements", judgements, JUDGED_SCHEMA)
    _create_view(connection, "judged", in_force, JUDGED_SCHEMA)
    connection.execute(
        "CREATE VIEW experiences AS SELECT r.*, j.reward, j.reward_parts, j.judge_version, j.advantage, j.dropped_by "
        "FROM rollouts r LEFT JOIN judged j USING (row_id)"
    )
    manifests = sorted(checkpoints_root.rglob("global_step_*/manifest.json")) if checkpoints_root else []
    checkpoints = [_checkpoint(path) for path in manifests]
    connection.register("checkpoints", pa.Table.from_pylist(checkpoints, CHECKPOINT_SCHEMA))
    return connection


def mean_reward_by_round(connection: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """``round, runs, mean_reward, std_reward`` of every judged round; a run's reward is that of its last step."""
    return _rows(
        connection,
        "SELECT round, count(*) AS runs, avg(reward) AS mean_reward, coalesce(stddev_samp(reward), 0) AS std_reward "
        "FROM (SELECT round, run_id, arg_max(reward, step) AS reward FROM experiences WHERE reward IS NOT NULL "
        "GROUP BY round, run_id) GROUP BY round ORDER BY round",
    )


def rows_that_trained(connection: duckdb.DuckDBPyConnection, round: int) -> list[dict[str, Any]]:
    """The rows behind a round's checkpoint: ``row_id, group_id, run_id, step, reward, advantage, judge_version``.

    They are the round's rollouts under the judge version that the checkpoint's manifest names, less those a filter
    dropped. Empty while the round has published no checkpoint.
    """
    return _rows(
        connection,
        "SELECT r.row_id, r.group_id, r.run_id, r.step, j.reward, j.advantage, j.judge_version FROM rollouts r "
        "JOIN judgements j USING (row_id) JOIN (SELECT DISTINCT round, judge_version FROM checkpoints) c "
        "ON c.round = r.round AND c.judge_version = j.judge_version "
        "WHERE r.round = ? AND j.dropped_by IS NULL ORDER BY r.run_id, r.step, r.row_id",
        [round],
    )


def rollout_transcripts(connection: duckdb.DuckDBPyConnection, round: int, n: int) -> list[dict[str, Any]]:
    """At most ``n`` runs of a round to read, evenly from the best reward to the worst, the same ones each time.

    ``run_id, task_id, reward, steps, messages, response, run_output``; messages and response are of the last step.
    """
    runs = _rows(
        connection,
        "SELECT run_id, task_id, reward, step + 1 AS steps, messages, response, run_output FROM experiences "
        "WHERE round = ? QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY step DESC, row_id) = 1 "
        "ORDER BY reward DESC NULLS LAST, run_id",
        [round],
    )
    if len(runs) > n:
        runs = [runs[index * (len(runs) - 1) // max(n - 1, 1)] for index in range(n)]
    for run in runs:
        for name in ("messages", "response", "run_output"):
            run[name] = None if run[name] is None else json.loads(run[name])
    return runs


def _rows(connection: duckdb.DuckDBPyConnection, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
    cursor = connection.execute(query, list(parameters))
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, paths: list[Path], schema: pa.Schema) -> None:
    if not paths:
        connection.register(name, schema.empty_table())
        return
    files = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
    try:
        connection.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet([{files}], union_by_name = true)")
    except duckdb.Error as error:
        raise StorageError(f"{name} of {len(paths)} files cannot be read: {error}") from error


def _checkpoint(manifest: Path) -> dict[str, Any]:
    try:
        document = read_json(manifest)
    except (ValueError, OSError) as error:
        raise StorageError(f"{manifest}: cannot be read ({error})") from error
    lineage = document.get("lineage", {})
    return {
        "checkpoint": str(manifest.parent),
        "round": lineage.get("round"),
        "policy_version": document.get("policy_version"),
        "judge_version": lineage.get("judge_version"),
        "manifest": json.dumps(document),
    }
