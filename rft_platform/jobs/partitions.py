"""Round partitions in Dagster: add the next one in advance, and find partitions that name no round."""

import dagster as dg

from rft_platform.assets.common import rft_rounds
from rft_platform.experience.rounds import is_round_key, round_key
from rft_platform.rounds.project import Project

_NAME = str(rft_rounds.name)


def add_next_round(instance: dg.DagsterInstance, project: Project) -> None:
    """Add the partition after the newest round, so that it can be selected in the launchpad."""
    newest = max(project.store.rounds(), default=0)
    key = round_key(1 if project.settings.offline is not None else newest + 1)
    if not instance.has_dynamic_partition(_NAME, key):
        instance.add_dynamic_partitions(_NAME, [key])


def unknown_partitions(instance: dg.DagsterInstance) -> list[str]:
    """Partitions that name no round, i.e. mistyped ones."""
    return [key for key in instance.get_dynamic_partitions(_NAME) if not is_round_key(key)]
