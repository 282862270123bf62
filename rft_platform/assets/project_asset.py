"""An asset that every project of some kind has: defined once with plain names, made for each project with its own.

An asset module decorates the body of an asset with ``@partial(ProjectAsset, ...)``, above ``@reports_faults``.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from rft_platform.resources.names import PLAIN_NAMES, DagsterNames
from rft_platform.rounds.reporting.round_tables import TABLES

OWNERS = ["team:rft"]


@dataclass(frozen=True, slots=True)
class ProjectAsset:
    """What ``dg.asset`` takes, with plain names; ``of`` makes the asset of a project."""

    body: Callable[..., dg.MaterializeResult[Any]]
    group_name: str
    kinds: set[str]
    each_round: bool = True  # whether the rounds are its partitions
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
            partitions_def=names.rounds if self.each_round else None,
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
