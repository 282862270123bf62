"""The data of rounds as tables: for notebooks (``load_round``), and for assets that read the assets of a project."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.experience.file_names import round_key
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.record import read

if TYPE_CHECKING:
    import pandas as pd


def load_round(home: str | Path, number: int) -> "pd.DataFrame":
    """The judged experiences of a round of the project in ``home``: a row per model call with reward and advantage.

    ``docs/store.md`` describes the columns (view ``experiences``). Raises UserError if there is no such round.
    """
    return as_frame(round_table(ExperienceStore(Home(Path(home)).rounds), "judged_experiences", [number]))


def as_frame(table: pa.Table) -> "pd.DataFrame":
    """The table as a data frame; maps become dictionaries, lists of tokens arrays."""
    return table.to_pandas(maps_as_pydicts="strict")


def round_table(store: ExperienceStore, asset: str, rounds: Sequence[int]) -> pa.Table:
    """The data of an asset of ``TABLES`` in some rounds as one table, in the order of the rounds.

    Rounds without data are left out. Raises UserError if none has any.
    """
    table = TABLES[asset](store, rounds)
    if not table.num_rows:
        keys = [round_key(number) for number in store.rounds() if number]
        has = f"its rounds are {keys[0]} to {keys[-1]}" if keys else "it has no rounds"
        named = ", ".join(map(round_key, rounds)) or "no round"
        raise UserError(f"{named}: {store.home} has no {asset} of it; {has}")
    return table


def _view(name: str) -> Callable[[ExperienceStore, Sequence[int]], pa.Table]:
    def read(store: ExperienceStore, rounds: Sequence[int]) -> pa.Table:
        from rft_platform.experience.queries import connect

        query = f"SELECT * FROM {name} ORDER BY round, run_id, step, row_id"
        with connect(store, rounds=rounds) as connection:
            return connection.sql(query).to_arrow_table()

    return read


def _evaluations(store: ExperienceStore, rounds: Sequence[int]) -> pa.Table:
    """One row per round: its policy, the decision of the gate, and every metric."""
    rows = []
    for number in rounds:
        record = read(store, number)
        evaluated, policy = record.evaluated, record.published()
        if evaluated is not None and policy is not None:
            about = {"round": number, "policy_version": policy.policy_version, "model_version": policy.model_version}
            rows.append({**about, "promoted": evaluated.promoted, "gate": evaluated.gate, **evaluated.metrics})
    names = dict.fromkeys(name for row in rows for name in row)  # a round that was not evaluated lacks most of them
    return pa.table({name: [row.get(name) for row in rows] for name in names})


#: How the data of an asset is read, by the asset's plain name.
TABLES: Mapping[str, Callable[[ExperienceStore, Sequence[int]], pa.Table]] = {
    "rollout_batches": _view("rollouts"),
    "online_experiences": _view("rollouts"),
    "judged_experiences": _view("experiences"),
    "evaluation_report": _evaluations,
}
