"""The groups of a round as trainings take them: runs of one task, with the version of the weights that sampled them."""

from dataclasses import dataclass

from rft_platform.errors import StorageError
from rft_platform.experience.rounds import round_key
from rft_platform.experience.store import ExperienceStore


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are compared with each other, and so are trained on together."""

    round: int
    group_id: str
    judge_version: str
    policy_version: int
    kept: tuple[str, ...]  # ids of rows that no filter dropped
    filtered: tuple[str, ...]
    uses: int = 0  # trainings that took it

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from every other group of the project."""
        return self.round, self.group_id


@dataclass(frozen=True, slots=True)
class OfPolicy:
    """One of several policies, which trains on its own rows."""

    name: str | None  # None: the first
    explored_with: int  # its version


def groups_of(store: ExperienceStore, number: int, policy: OfPolicy | None = None) -> list[Group]:
    """The groups of a round by its judgement in force, in the order of its rows; ``policy``: of its rows alone.

    Raises StorageError where the round is not explored and judged.
    """
    explored, judge_version = store.read_note(number, "explore"), store.judge_version(number)
    if explored is None or judge_version is None:
        key = round_key(number)
        raise StorageError(f"{key} has no judged experiences to train on: launch explore_job for {key}")
    rows = store.read_judged(number, judge_version, columns=["row_id", "group_id", "dropped_by"]).to_pylist()
    version = explored["policy_version"]
    if policy is not None:
        version, called = policy.explored_with, store.read_rollouts(number, columns=["row_id", "policy"]).to_pylist()
        own = {row["row_id"] for row in called if row["policy"] == policy.name}
        rows = [row for row in rows if row["row_id"] in own]
    kept: dict[str, list[str]] = {}
    filtered: dict[str, list[str]] = {}
    for row in rows:
        kept.setdefault(row["group_id"], [])
        (kept if row["dropped_by"] is None else filtered).setdefault(row["group_id"], []).append(row["row_id"])
    return [
        Group(number, name, judge_version, version, tuple(ids), tuple(filtered.get(name, ())))
        for name, ids in kept.items()
    ]


def split_stale(groups: list[Group], version: int, limit: int | None) -> tuple[list[Group], list[Group]]:
    """Those young enough for a training that starts from policy ``version``, and those too old.

    ``limit``: the most versions that a group may be older; None: any age will do.
    """
    if limit is None:
        return groups, []
    oldest = version - limit
    return [g for g in groups if g.policy_version >= oldest], [g for g in groups if g.policy_version < oldest]
