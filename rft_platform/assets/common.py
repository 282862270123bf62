"""What all assets share: the round of a run, pools, metadata builders, and ``ProjectAsset``.

A ``ProjectAsset`` is an asset that every project of some kind has: defined once with plain names, made for each project
with its own. A module decorates the body of an asset with ``@partial(ProjectAsset, ...)``, above ``@reports_faults``.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from rft_platform.common.errors import UserError
from rft_platform.experience.file_names import is_round_key, round_number
from rft_platform.resources.names import PLAIN_NAMES, DagsterNames
from rft_platform.rounds.reporting.round_tables import TABLES

ENGINE_POOL = "engine"
TRAINER_POOL = "trainer"
_WHOLE = 2**53  # larger floats are not exact


def round_of(context: dg.AssetExecutionContext) -> int:
    """Number of this run's round. Raises UserError without a partition, and for one that names no round."""
    if not context.has_partition_key:
        raise UserError("the run was launched without a partition, and works on one round: choose one, such as r0001")
    key = context.partition_key
    if is_round_key(key):
        return round_number(key)
    definition = context.assets_def.partitions_def
    partitions = [] if definition is None else definition.get_partition_keys(dynamic_partitions_store=context.instance)
    known = sorted(filter(is_round_key, partitions), key=round_number)
    has = f"launch one of {known[0]} to {known[-1]}" if known else "this project has none yet: start it with `rft run`"
    raise UserError(f"partition {key!r} is not a round: rounds are r0001, r0002, ...; {has}")


def numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    """The entries of a report that are numbers; Dagster plots each of them over the rounds."""
    return {
        name: rounded(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def rounded(value: float) -> int | float:
    """A number that people read at a glance: four significant digits, large ones with one decimal, whole ones whole."""
    if isinstance(value, int) or not math.isfinite(value):
        return value
    if value.is_integer() and abs(value) < _WHOLE:
        return int(value)
    return round(value, 1) if abs(value) >= 1000 else float(f"{value:.4g}")


def columns_of(schema: Any, descriptions: Mapping[str, str]) -> dg.TableSchema:
    """Dagster's description of an Arrow schema, with the descriptions of its columns by name."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(name=field.name, type=str(field.type), description=descriptions.get(field.name))
            for field in schema
        ]
    )


def report_table(reports: Sequence[Any]) -> dg.TableMetadataValue:
    """A table with one row per dataclass instance and its fields as columns; empty without reports."""
    records = [dg.TableRecord({key: _cell(value) for key, value in asdict(report).items()}) for report in reports]
    return dg.MetadataValue.table(records, schema=None if records else dg.TableSchema(columns=[]))


def value_table(values: Mapping[str, Any]) -> dg.TableMetadataValue:
    """A table with one row for each entry of ``values``: its name and its value."""
    records = [dg.TableRecord({"name": name, "value": _cell(value)}) for name, value in values.items()]
    columns = [dg.TableColumn("name"), dg.TableColumn("value")]
    return dg.MetadataValue.table(records, schema=dg.TableSchema(columns=columns))


def path(folder_or_file: str | Path) -> dg.PathMetadataValue:
    """A path that can be copied in the UI."""
    return dg.MetadataValue.path(str(folder_or_file))


def links(pages: Mapping[str, str]) -> dict[str, dg.UrlMetadataValue]:
    """Links that open in the UI, by label."""
    return {label: dg.MetadataValue.url(page) for label, page in pages.items()}


def _cell(value: Any) -> str | int | float | bool | None:
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_cell(each)}" for name, each in value.items())
    return value if isinstance(value, str | int | bool | None) else ", ".join(map(str, value))


OWNERS = ["team:rft"]


@dataclass(frozen=True, slots=True)
class ProjectAsset:
    """What ``dg.asset`` takes, with plain names; ``of`` makes the asset of a project."""

    body: Callable[..., dg.MaterializeResult[Any]]
    group_name: str
    kinds: set[str]
    each_round: bool = True  # whether the rounds are its partitions
    each_import: bool = False  # whether the imports of traces are
    deps: Sequence[str] = ()
    pool: str | None = None
    check_specs: Sequence[dg.AssetCheckSpec] = ()
    description: str | None = None  # by default the body's docstring

    @property
    def name(self) -> str:
        """The plain name."""
        return self.body.__name__

    def of(self, names: DagsterNames) -> dg.AssetsDefinition:
        """The asset of the project with these names."""
        return dg.asset(
            key=names.key(self.name),
            partitions_def=names.imports if self.each_import else names.rounds if self.each_round else None,
            group_name=names.name(self.group_name),
            owners=OWNERS,
            kinds=self.kinds,
            deps=list(map(names.key, self.deps)),
            io_manager_key=names.name("tables") if self.name in TABLES else None,
            pool=None if self.pool is None else names.name(self.pool),
            check_specs=[check_of(spec, names) for spec in self.check_specs],
            description=self.description,
        )(names.bound(self.body))


def round_check(name: str, *, asset: str, description: str, blocking: bool = False) -> dg.AssetCheckSpec:
    """A check with a result for each round."""
    return _check(name, asset, description, blocking, PLAIN_NAMES, each_round=True)


def check_of(spec: dg.AssetCheckSpec, names: DagsterNames) -> dg.AssetCheckSpec:
    """The check of the project with these names; ``spec`` has plain names."""
    asset, each_round = spec.asset_key.path[-1], spec.partitions_def is not None
    return _check(spec.name, asset, spec.description, spec.blocking, names, each_round=each_round)


def _check(
    name: str, asset: str, description: str | None, blocking: bool, names: DagsterNames, *, each_round: bool
) -> dg.AssetCheckSpec:
    with warnings.catch_warnings():  # Dagster calls the parameter a preview and warns about it
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return dg.AssetCheckSpec(
            name,
            asset=names.key(asset),
            description=description,
            blocking=blocking,
            partitions_def=names.rounds if each_round else None,
        )
