"""The groups of a round as units of training: runs of one task, with the policy version that sampled them."""

from dataclasses import dataclass

from rft_platform.errors import StorageError
from rft_platform.experience.rounds import round_key
from rft_platform.experience.store import ExperienceStore


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are compared with each other and are therefore trained on together."""

    round: int
    group_id: str
    judge_version: str
    policy_version: int
    kept: tuple[str, ...]  # ids of rows that no filter dropped
    filtered: tuple[str, ...]
    uses: int = 0  # number of trainings that used it

    @property
    def key(self) -> tuple[int, str]:
        """Unique key of the group within the project."""
        return self.round, self.group_id


@dataclass(frozen=True, slots=True)
class OfPolicy:
    """Selects the rows of one policy, if several policies train on their own rows."""

    name: str | None  # None: the first policy
    explored_with: int  # policy version


def groups_of(store: ExperienceStore, number: int, policy: OfPolicy | None = None) -> list[Group]:
    """The groups of a round by its active judgement, in row order; ``policy`` restricts them to one policy's rows.

    Raises StorageError if the round is not explored and judged.
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
    """Split groups into those recent enough for a training that starts from policy ``version``, and those too old.

    ``limit`` is the largest allowed age in policy versions; None allows any age.
    """
    if limit is None:
        return groups, []
    oldest = version - limit
    return [g for g in groups if g.policy_version >= oldest], [g for g in groups if g.policy_version < oldest]
