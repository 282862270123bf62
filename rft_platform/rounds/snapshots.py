"""Which weights a round explores with, in each sync style; settled once, by ``take_snapshot``."""

from rft_platform.rounds.dynamic import versions_ahead
from rft_platform.rounds.observe import Launches, observe
from rft_platform.rounds.policy import SNAPSHOT, Policy, explorer_of, is_published, snapshot_of, take_snapshot
from rft_platform.rounds.project import Project


def snapshot_for(project: Project, number: int) -> Policy:
    """The policy that a round explores with, noted; so are those of section ``policies``. Returns the first.

    ``fixed``: the newest of round ``number - 1 - sync_offset`` or later. ``dynamic_by_trainer``: the newest there is.
    ``dynamic_by_explorer``: the newest there is after every ``sync_interval`` batches, between these the same one.
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
    """The policy of the batch before; None where it is gone, or its rows would be too old when they train."""
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
