"""What Dagster's interface calls unsynced, missing or without a check result, for every partition of a project."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance
from rft_platform.project_definitions import stored_definitions
from rft_platform.resources.names import PLAIN_NAMES


def unsynced(home: Path) -> dict[tuple[str, str | None], list[str]]:
    """The stale causes of each (asset, partition) of the project in ``home`` that is not fresh; MISSING has none."""
    with open_instance(Home(home)) as instance:
        return unsynced_in(instance, stored_definitions(Home(home)), str(PLAIN_NAMES.rounds.name))


def unsynced_in(
    instance: dg.DagsterInstance, definitions: dg.Definitions, rounds: str
) -> dict[tuple[str, str | None], list[str]]:
    """As ``unsynced``, for the definitions of any deployment; ``rounds`` names its partitions."""
    graph = definitions.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))  # the webserver's resolver
    keys = [*instance.get_dynamic_partitions(rounds)]
    assert keys, "the instance has no rounds"
    found = {}
    for node in graph.asset_nodes:
        for partition in keys if node.is_partitioned else [None]:
            if (status := resolver.get_status(node.key, partition)) is not StaleStatus.FRESH:
                causes = [_text(cause) for cause in resolver.get_stale_causes(node.key, partition)]
                found[node.key.to_user_string(), partition] = causes or [status.value]
    return found


def missing_checks(home: Path) -> list[str]:
    """Each check of an asset that has no result for a partition that was materialized."""
    with open_instance(Home(home)) as instance:
        return list(missing_checks_in(instance, stored_definitions(Home(home))))


def missing_checks_in(instance: dg.DagsterInstance, definitions: dg.Definitions) -> Iterator[str]:
    """As ``missing_checks``, for the definitions of any deployment."""
    graph = definitions.resolve_asset_graph()
    for check in graph.asset_check_keys:
        records = instance.event_log_storage.get_asset_check_execution_history(check, limit=1000)
        known = {record.partition for record in records if record.event is not None}
        made = set(instance.get_materialized_partitions(check.asset_key)) or {None}
        yield from (f"{check.to_user_string()} of {partition}" for partition in sorted(made - known, key=str))


def _text(cause: object) -> str:
    dependency = getattr(cause, "dependency", None)
    return f"{getattr(cause, 'reason', '')}: {dependency.asset_key.to_user_string() if dependency else ''}"
