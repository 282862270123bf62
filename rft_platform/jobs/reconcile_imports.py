"""Report imports of traces to a Dagster instance: those of ``rft import``, and changes that ``rft forget`` made."""

import logging

import dagster as dg

from rft_platform.assets.imports import import_metadata
from rft_platform.common.errors import StorageError
from rft_platform.config.home import Home
from rft_platform.resources.names import PLAIN_NAMES, DagsterNames
from rft_platform.traces.imports import Imports

LOG = logging.getLogger(__name__)
_VERSION = "dagster/data_version"


def reconcile_imports(home: Home, instance: dg.DagsterInstance, names: DagsterNames = PLAIN_NAMES) -> list[str]:
    """Add a partition for each import, and report those whose rows Dagster does not know; returns their names."""
    imports, key, reported = Imports(home), names.key("imported_traces"), []
    found = imports.names()
    known = set(instance.get_dynamic_partitions(str(names.imports.name))) if found else set()
    if set(found) - known:
        instance.add_dynamic_partitions(str(names.imports.name), sorted(set(found) - known))
    for name in found:
        try:
            report = imports.report(name)
        except StorageError as error:
            LOG.warning("import %s is not reported to Dagster: %s", name, error)
            continue
        if _version_of(instance, key, name) != report.digest:
            instance.report_runless_asset_event(
                dg.AssetMaterialization(
                    asset_key=key,
                    partition=name,
                    description="Made or changed on disk, and not by a run of this Dagster instance.",
                    metadata=import_metadata(home, report),
                    tags={_VERSION: report.digest},
                )
            )
            reported.append(name)
    return reported


def _version_of(instance: dg.DagsterInstance, key: dg.AssetKey, partition: str) -> str | None:
    """The data version of the newest materialization of a partition."""
    chosen = dg.AssetRecordsFilter(asset_key=key, asset_partitions=[partition])
    records = instance.fetch_materializations(chosen, limit=1).records
    event = records[0].asset_materialization if records else None
    return None if event is None or event.tags is None else event.tags.get(_VERSION)
