"""Which weights a round explores with, in each sync style; ``take_snapshot`` records them once."""

from rft_platform.rounds.dynamic import versions_ahead
from rft_platform.rounds.observe import Launches, observe
from rft_platform.rounds.policy import SNAPSHOT, Policy, explorer_of, is_published, snapshot_of, take_snapshot
from rft_platform.rounds.project import Project


def snapshot_for(project: Project, number: int) -> Policy:
    """Record the policies that a round explores with, including those of section ``policies``; returns the first.

    ``fixed``: the newest of round ``number - 1 - sync_offset`` or later. ``dynamic_by_trainer``: the newest.
    ``dynamic_by_explorer``: the newest, chosen again after every ``sync_interval`` batches.
    """
    sync, store = project.config.synchronizer, project.store
    for entry in project.config.policies:
        take_snapshot(store, number, sync.offset_rounds, name=entry.name)
    if not sync.dynamic:
        return take_snapshot(store, number, sync.offset_rounds)
    going_on = None
    if sync.sync_style == "dynamic_by_explorer" and (number - 1) % sync.sync_interval:
        going_on = _going_on(project, number)
    return take_snapshot(store, number, number - 1, going_on)


def _going_on(project: Project, number: int) -> Policy | None:
    """The policy of the previous batch; None if it is gone, or if its rows would be too old for their training."""
    store, limit = project.store, project.config.synchronizer.max_staleness
    if not store.has_note(number - 1, SNAPSHOT):
        return None
    held = snapshot_of(store, number - 1)
    if not is_published(store, held):
        return None
    if limit is not None:
        behind = explorer_of(store, number, number - 1).policy_version - held.policy_version
        if behind + versions_ahead(observe(project, Launches())) > limit:
            return None
    return held
