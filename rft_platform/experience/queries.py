"""SQL queries over the rows of all rounds: DuckDB views that read the Parquet files in place.

Views: the rows and judgements of the rounds, and ``conversations``, one row per run. ``task_outcomes`` counts runs and
passes per task. DuckDB is slow to import: modules that ``definitions`` imports load this module inside a function.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from rft_platform.common.errors import StorageError
from rft_platform.common.files import read_json
from rft_platform.experience.file_ledger import Contents
from rft_platform.experience.record import REWARD_ROUNDING
from rft_platform.experience.schema import JUDGED_SCHEMA, ROLLOUT_SCHEMA
from rft_platform.experience.selections import SELECTION_SCHEMA, TRAINED_ON, selection_files
from rft_platform.experience.store import ExperienceStore
from rft_platform.object_store.mirror import mirror_of

#: The view ``conversations``, one row per run, over the view ``experiences``.
#:
#: ``messages`` is the whole conversation of the run's last call, including the answer. ``thoughts`` are the model's
#: reasoning texts, ``{step, content}``, with steps counted from 1. ``tool_calls`` are ``{step, tool, args, result}``:
#: the result comes from the tool message that answers the call in a later prompt of the run, null if there is none.
#: Some agents use an id again, such as ``call_0`` in each reply: the last message with it answers its last use.
#: ``rewards`` are the judge's reward parts of the run's last step; ``total_reward`` is the reward of that step.
#:
#: If a call has several choices, only one is included. Thoughts and tool calls are collected over all steps, so they
#: are complete even if an agent shortens its history.
CONVERSATIONS = """
CREATE VIEW conversations AS
WITH steps AS (
    SELECT *, from_json(messages, '["JSON"]') AS prompt_messages FROM experiences
    QUALIFY row_number() OVER (PARTITION BY run_id, step ORDER BY row_id) = 1
),
lasts AS (
    SELECT * FROM steps QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY step DESC) = 1
),
thoughts AS (
    SELECT run_id, list({'step': step + 1, 'content': content} ORDER BY step) AS thoughts
    FROM (
        SELECT run_id, step, coalesce(response->>'reasoning_content', response->>'reasoning') AS content FROM steps
    )
    WHERE content <> ''
    GROUP BY run_id
),
calls AS (
    SELECT run_id, step, place, id, call->'function'->>'name' AS tool, call->'function'->>'arguments' AS args,
        row_number() OVER (PARTITION BY run_id, id ORDER BY step, place) AS use
    FROM (
        SELECT run_id, step, place, call, call->>'id' AS id
        FROM (
            SELECT run_id, step, unnest(requested) AS call, generate_subscripts(requested, 1) AS place
            FROM (SELECT run_id, step, from_json(response->'tool_calls', '["JSON"]') AS requested FROM steps)
        )
    )
),
uses AS (
    SELECT run_id, id, step, max(use) AS last FROM calls GROUP BY run_id, id, step
),
answers AS (
    SELECT run_id, step, id, content,
        row_number() OVER (PARTITION BY run_id, step, id ORDER BY place DESC) AS from_end
    FROM (
        SELECT run_id, step, place, message->>'tool_call_id' AS id, message->>'content' AS content
        FROM (
            SELECT run_id, step, unnest(prompt_messages) AS message, generate_subscripts(prompt_messages, 1) AS place
            FROM steps
        )
        WHERE message->>'role' = 'tool'
    )
),
results AS (
    SELECT a.run_id, a.id, u.last - a.from_end + 1 AS use, arg_min(a.content, a.step) AS result
    FROM answers a ASOF JOIN uses u ON u.run_id = a.run_id AND u.id = a.id AND a.step > u.step
    GROUP BY ALL
),
tool_calls AS (
    SELECT c.run_id,
        list({'step': c.step + 1, 'tool': c.tool, 'args': c.args, 'result': r.result} ORDER BY c.step, c.place)
            AS tool_calls
    FROM calls c LEFT JOIN results r ON r.run_id = c.run_id AND r.id = c.id AND r.use = c.use
    GROUP BY c.run_id
)
SELECT l.run_id AS conversation_id, l.round, l.task_id, l.group_id,
    to_json(list_append(l.prompt_messages, l.response::JSON)) AS messages,
    coalesce(t.thoughts, []) AS thoughts,
    coalesce(c.tool_calls, []) AS tool_calls,
    l.reward_parts AS rewards,
    l.reward AS total_reward
FROM lasts l LEFT JOIN thoughts t ON t.run_id = l.run_id LEFT JOIN tool_calls c ON c.run_id = l.run_id
"""


#: One row per checkpoint; ``manifest`` is the whole document as text, for ``json_extract``.
CHECKPOINT_SCHEMA = pa.schema(
    [
        ("checkpoint", pa.string()),
        ("round", pa.int32()),
        ("policy_version", pa.int64()),
        ("judge_version", pa.string()),
        ("manifest", pa.string()),
    ]
)

# Judgement files do not contain their round, but their folder's name does. With the round taken from the path, a query
# for one round opens only the files of that round.
JUDGED_WITH_ROUND = JUDGED_SCHEMA.append(pa.field("round", pa.int32()))
_ROUND = "CAST(regexp_extract(filename, '/r(\\d+)/[^/]+/[^/]+$', 1) AS INTEGER)"
_FROM_ROLLOUTS = f"* EXCLUDE (filename) REPLACE ({_ROUND} AS round)"
SELECTIONS_WITH_TRAINING = SELECTION_SCHEMA.append(pa.field("training", pa.int32()))
_FROM_SELECTIONS = "* EXCLUDE (filename), CAST(regexp_extract(filename, '/r(\\d+)/[^/]+$', 1) AS INTEGER) AS training"
_FROM_JUDGED = f"* EXCLUDE (filename), {_ROUND} AS round"

#: Condition on a checkpoint ``c``: its rows were selected one by one.
_SELECTED = "json_extract(c.manifest, '$.lineage.row_selection') IS NOT NULL"

MEMORY_LIMIT = "512MB"


def connect(
    store: ExperienceStore,
    checkpoints_root: Path | None = None,
    *,
    rounds: Iterable[int] | None = None,
) -> duckdb.DuckDBPyConnection:
    """An in-memory connection with these views of the current files (a view without files is empty):

    - ``rollouts``: every rollout row;
    - ``judgements``: the rows of every judge version; ``judged``: the rows of each round's current judgement; both with
      their ``round``;
    - ``experiences``: rollouts joined with their current judgement, null if there is none yet;
    - ``selections``: one row for each row that a training of a dynamic sync style took; ``training`` is the round of
      that training;
    - ``conversations``: one row per run with its messages, thoughts, tool calls and rewards (``CONVERSATIONS``);
    - ``checkpoints``: one row per ``manifest.json`` below ``checkpoints_root``.

    ``rounds`` limits the views to some rounds (default: all), so that a query over one round reads only that round's
    files. Data that exceeds ``MEMORY_LIMIT`` is spilled to a temporary folder.
    """
    connection = _open()
    files = _Files.of(store, store.rounds() if rounds is None else rounds)
    _create_view(connection, store, "rollouts", _FROM_ROLLOUTS, files.rollouts, ROLLOUT_SCHEMA)
    for name, paths in (("judgements", files.judgements), ("judged", files.judged)):
        _create_view(connection, store, name, _FROM_JUDGED, paths, JUDGED_WITH_ROUND)
    _create_view(connection, store, "selections", _FROM_SELECTIONS, files.selections, SELECTIONS_WITH_TRAINING)
    connection.execute(
        "CREATE VIEW experiences AS SELECT r.*, j.reward, j.reward_parts, j.judge_version, j.advantage, j.dropped_by "
        "FROM rollouts r LEFT JOIN judged j ON r.row_id = j.row_id AND r.round = j.round"
    )
    connection.execute(CONVERSATIONS)
    manifests = sorted(checkpoints_root.rglob("global_step_*/manifest.json")) if checkpoints_root else []
    checkpoints = [_checkpoint(path) for path in manifests]
    connection.register("checkpoints", pa.Table.from_pylist(checkpoints, CHECKPOINT_SCHEMA))
    return connection


def mean_reward_by_round(connection: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """``round, runs, mean_reward, std_reward`` of every judged round; the reward of a run is that of its last step."""
    return _rows(
        connection,
        "SELECT round, count(*) AS runs, avg(reward) AS mean_reward, coalesce(stddev_samp(reward), 0) AS std_reward "
        "FROM (SELECT round, run_id, arg_max(reward, step) AS reward FROM judged WHERE isfinite(reward) "
        "GROUP BY round, run_id) GROUP BY round ORDER BY round",
    )


def rows_that_trained(connection: duckdb.DuckDBPyConnection, round: int) -> list[dict[str, Any]]:
    """The rows behind a round's checkpoint: ``row_id, group_id, run_id, step, reward, advantage, judge_version``.

    These are the rows judged by the judge version in the checkpoint's manifest, without the rows that a filter dropped.
    If the training selected its rows one by one (dynamic sync styles), these are the selected rows, of any round.
    Retired rounds have them, too. Empty until the round has published a checkpoint.
    """
    selected = _rows(
        connection,
        "SELECT j.row_id, j.group_id, j.run_id, j.step, j.reward, j.advantage, j.judge_version FROM judgements j "
        "JOIN selections s ON s.row_id = j.row_id AND s.round = j.round AND s.judge_version = j.judge_version "
        f"WHERE s.training = ? AND s.use IN {TRAINED_ON} AND EXISTS "
        f"(FROM checkpoints c WHERE c.round = s.training AND {_SELECTED}) ORDER BY j.run_id, j.step, j.row_id",
        [round],
    )
    return selected or _rows(
        connection,
        "SELECT j.row_id, j.group_id, j.run_id, j.step, j.reward, j.advantage, j.judge_version FROM judgements j "
        f"JOIN (SELECT DISTINCT c.round, c.judge_version FROM checkpoints c WHERE NOT ({_SELECTED})) c "
        "ON c.round = j.round AND c.judge_version = j.judge_version "
        "WHERE j.round = ? AND j.dropped_by IS NULL ORDER BY j.run_id, j.step, j.row_id",
        [round],
    )


def _rows(connection: duckdb.DuckDBPyConnection, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
    try:
        cursor = connection.execute(query, list(parameters))
    except (duckdb.IOException, duckdb.InvalidInputException) as error:  # most files are opened only now
        raise StorageError(f"rows cannot be read: {_first_line(error)}; `rft store check` names such files") from error
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def find_row(store: ExperienceStore, row_id: str, columns: Sequence[str]) -> dict[str, Any] | None:
    """Some columns of one rollout row of any round; None if no round holds it."""
    rollouts = [path for number in store.rounds() for path in store.rollout_files(number)]
    if (mirror := mirror_of(store.home)) is not None:
        rollouts = mirror.holding(rollouts, row_id)
    with _open() as connection:
        _create_view(connection, store, "rollouts", _FROM_ROLLOUTS, rollouts, ROLLOUT_SCHEMA)
        found = _rows(connection, f"SELECT {', '.join(columns)} FROM rollouts WHERE row_id = ?", [row_id])
    return found[0] if found else None


def judgements_of(store: ExperienceStore, row_id: str, rounds: Iterable[int]) -> list[dict[str, Any]]:
    """All judgements of a row in some rounds, one per judge version: the columns of ``JUDGED_SCHEMA`` and ``round``."""
    judgements = list[Path]()
    for number in rounds:
        store.judged_file(number)  # if the current judgement is lost, its error names the remedy
        judgements += store.judged_files(number)
    with _open() as connection:
        _create_view(connection, store, "judgements", _FROM_JUDGED, judgements, JUDGED_WITH_ROUND)
        return _rows(connection, "SELECT * FROM judgements WHERE row_id = ? ORDER BY judge_version", [row_id])


@dataclass(slots=True)
class _Files:
    """The files that the views read."""

    rollouts: list[Path]
    judgements: list[Path]
    judged: list[Path]
    selections: list[Path]

    @classmethod
    def of(cls, store: ExperienceStore, rounds: Iterable[int]) -> "_Files":
        """The stored files of some rounds, read from their ledgers."""
        ledgers = {number: store.ledger(number).read() for number in rounds}
        judgements = _paths(store, ledgers, Contents.judgements)
        in_force = {store.judged_file(number, contents=contents) for number, contents in ledgers.items()}
        return cls(
            _paths(store, ledgers, Contents.rollouts),
            judgements,
            [path for path in judgements if path in in_force],
            [path for number in ledgers for path in selection_files(store, number)],
        )


def _paths(
    store: ExperienceStore, ledgers: Mapping[int, Contents], names: Callable[[Contents], list[str]]
) -> list[Path]:
    """The files that ``names`` lists in the ledger of each round."""
    return [store.round_folder(number) / name for number, contents in ledgers.items() for name in names(contents)]


def _open() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:")
    connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
    connection.execute("SET preserve_insertion_order = false")
    with suppress(duckdb.InvalidInputException):  # a notebook without ipywidgets cannot show a progress bar
        connection.execute("SET enable_progress_bar = false")
    spill = (Path(tempfile.gettempdir()) / f"rft-duckdb-{os.getpid()}").as_posix().replace("'", "''")
    connection.execute(f"SET temp_directory = '{spill}'")  # the default is below the current folder
    return connection


def _create_view(
    connection: duckdb.DuckDBPyConnection,
    store: ExperienceStore,
    name: str,
    select: str,
    paths: Sequence[Path],
    schema: pa.Schema,
) -> None:
    """Create a view: the SELECT list ``select`` over the rows of some files; without files it is empty.

    Files that only the project's object store has are read there.
    """
    if paths:
        mirror = mirror_of(store.home)
        places = [str(path) if mirror is None else mirror.readable(path) for path in paths]
        if mirror is not None and any("://" in place for place in places):
            _register(connection, mirror.remote.filesystem)
        files = ", ".join("'" + place.replace("'", "''") + "'" for place in places)
        # Without hive_partitioning = false a folder ``round=7`` above the project would be a column.
        query = f"SELECT {select} FROM read_parquet([{files}], filename = true, hive_partitioning = false)"
    else:
        query = f"SELECT * FROM {_empty(connection, name, schema)}"
    try:
        connection.execute(f"CREATE VIEW {name} AS {query}")
    except duckdb.Error as error:
        raise StorageError(
            f"the view {name} over {len(paths)} files cannot be created: {_first_line(error)}; `rft store check` names "
            "missing and damaged files"
        ) from error


def _register(connection: duckdb.DuckDBPyConnection, filesystem: Any) -> None:
    """Let DuckDB read through an fsspec file system, unless it does so already."""
    protocol = filesystem.protocol
    if not connection.filesystem_is_registered(protocol if isinstance(protocol, str) else protocol[0]):
        connection.register_filesystem(filesystem)


def _first_line(error: duckdb.Error) -> str:
    return str(error).partition("\n")[0]


def _empty(connection: duckdb.DuckDBPyConnection, name: str, schema: pa.Schema) -> str:
    """An empty table. It lies in a separate schema, so that SHOW TABLES lists only the views."""
    connection.execute("CREATE SCHEMA IF NOT EXISTS nothing")
    connection.register("empty", schema.empty_table())
    connection.execute(f"CREATE TABLE nothing.{name} AS SELECT * FROM empty")
    connection.unregister("empty")
    return f"nothing.{name}"


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


# All rows of a run carry its judgement. With several policies, a row of the first policy counts if the run has one.
# Changes that operators made to the reward are ignored: the reward part ``judged`` keeps the judge's reward. The part
# ``passed`` is set by the operator pass_rate_calculator.
_QUERY = """
SELECT task_id, round, count(*)::DOUBLE AS runs, sum(passed) AS passes
FROM (
    SELECT r.round, r.run_id, any_value(r.task_id) AS task_id, arg_max(coalesce(
        j.reward_parts['passed'], (coalesce(j.reward_parts['judged'], j.reward) >= ?)::DOUBLE
    ), (r.policy = 'policy', r.step)) AS passed
    FROM rollouts r JOIN judged j ON j.row_id = r.row_id AND j.round = r.round
    WHERE isfinite(j.reward)
    GROUP BY r.round, r.run_id
)
GROUP BY task_id, round ORDER BY round, task_id
"""


def task_outcomes(
    store: ExperienceStore, rounds: Iterable[int], pass_reward: float = 1.0
) -> list[tuple[str, int, float, float]]:
    """``(task_id, round, runs, passes)`` by the current judgement of some rounds; failed judgements do not count."""
    numbers = list(rounds)
    if not numbers:
        return []
    with connect(store, rounds=numbers) as connection:
        return connection.execute(_QUERY, [pass_reward - REWARD_ROUNDING]).fetchall()
