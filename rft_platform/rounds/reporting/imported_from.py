"""The traces of other tools behind a training: those that its dataset, its demonstrations or its tasks were made of."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.rounds.setup.demonstrations import EXPERTS, WARM_START
from rft_platform.traces.datasets import TASKS
from rft_platform.traces.origins import Origin, dataset_origins, distinct_origins, task_origins

if TYPE_CHECKING:
    from rft_platform.experience.store import ExperienceStore


def traces_behind(lineage: Mapping[str, Any], store: "ExperienceStore | None") -> tuple[Origin, ...]:
    """The traces of other tools from which the rows of a training, or their tasks, were imported."""
    number = lineage.get("round")
    if store is None or number is None:
        return ()
    start = store.round_folder(0) / (EXPERTS if number else WARM_START)
    file = store.round_folder(number) / str(lineage["dataset"]) if lineage.get("dataset") else start
    found = list(dataset_origins(file))
    tasks = task_origins(store.home / "imports" / TASKS) if lineage.get("row_selection") else {}
    if tasks:
        found += [origin for task in _tasks_of(lineage, store, number) for origin in tasks.get(task, ())]
    return distinct_origins(found)


def _tasks_of(lineage: Mapping[str, Any], store: "ExperienceStore", training: int) -> list[str]:
    """The tasks of the rows that a training read; of retired rollouts nothing is known."""
    from rft_platform.experience.selections import TRAINED_ON, read_selection

    policy, found = lineage.get("policy", DEFAULT_POLICY), list[str]()
    selected = read_selection(store, training, ["row_id", "use"], policy).to_pylist()
    taken = {row["row_id"] for row in selected if row["use"] in TRAINED_ON}
    for number in map(int, lineage["row_selection"]["judge_versions"]):
        if not store.ledger(number).read().retired:
            rows = store.read_rollouts(number, ["row_id", "task_id"]).to_pylist()
            found += [row["task_id"] for row in rows if row["row_id"] in taken]
    return list(dict.fromkeys(found))
