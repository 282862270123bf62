"""Maintenance of a project's store: decide which rounds are compacted or retired.

Only closed rounds are changed. A closed round is trained and evaluated, so no stage reads or writes its rows, and its
trainer state is saved, so its training is not repeated.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rft_platform.common.digests import lacks_state
from rft_platform.common.errors import StorageError, StoreTakenError, TransientError, UserError
from rft_platform.experience.maintenance import (
    GRACE_S,
    Retirement,
    Rewrite,
    compact_round,
    retire_round,
    sweep_round,
)
from rft_platform.model_registry.manifests import chain, read_manifest
from rft_platform.object_store.mirror import mirror_of
from rft_platform.rounds.maintenance.checkpoint_retention import needed_to_repeat
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, read

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry

LOG = logging.getLogger(__name__)
_DAY_S = 86_400.0
_Done = TypeVar("_Done")


@dataclass(slots=True)
class Upkeep:
    """The changes that were made, or in a dry run would be made."""

    dry_run: bool
    rewrites: list[Rewrite] = field(default_factory=list)
    retirements: list[Retirement] = field(default_factory=list)
    protected: list[int] = field(default_factory=list)  # rounds kept because the champion was trained on them
    freed_bytes: int = 0  # by deleting files that were replaced or retired long enough ago, and orphans
    orphans: int = 0  # objects of interrupted uploads on the project's object store
    problems: list[str] = field(default_factory=list)  # rounds left unchanged, with the reason


def closed_rounds(project: Project) -> list[int]:
    """Rounds that are trained and evaluated, and whose training a killed trainer would not repeat, ascending."""
    store, repeated = project.store, _rounds_to_repeat(project)
    records = [read(store, number) for number in store.rounds() if number and number not in repeated]
    return [record.number for record in records if record.has(Policy) and record.has(RoundEvaluation)]


def _rounds_to_repeat(project: Project) -> set[int]:
    """Rounds with rows of trainings whose trainer state is not saved."""
    folders = {Path(policy.folder) for name in project.policies for policy in needed_to_repeat(project, name)}
    return {n for folder in folders if lacks_state(folder) for n in _rounds_read(read_manifest(folder).lineage)}


def compact(project: Project, *, keep_last: int = 2, grace_s: float = GRACE_S, dry_run: bool = False) -> Upkeep:
    """Merge the rollout files of each closed round into one, except for the newest ``keep_last`` rounds."""
    store, report = project.store, Upkeep(dry_run)
    for number in _all_but_last(project, keep_last):
        report.rewrites += _try(report, partial(compact_round, store, number, dry_run=dry_run)) or []
    _sweep_all(project, report, grace_s)
    return report


def retain(
    project: Project,
    registry: "ModelRegistry",
    *,
    keep_last: int | None = None,
    older_than_days: float | None = None,
    archive: Path | None = None,
    champion_too: bool = False,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
) -> Upkeep:
    """Retire the rollouts of closed rounds, except for the newest ``keep_last`` and those younger than the age limit.

    Rounds that the champion or its ancestors were trained on are kept unless ``champion_too``. Raises UserError if no
    limit is given.
    """
    if keep_last is None and older_than_days is None:
        raise UserError(
            "retention needs a limit, and none was given: set keep_last (number of newest rounds to keep), "
            "older_than_days (an age), or both: keys of the run configuration of retention_job, options --keep-last "
            "and --older-than-days of `rft store retain`"
        )
    store, report = project.store, Upkeep(dry_run)
    protected = set() if champion_too else champion_rounds(project, registry)
    before = None if older_than_days is None else time.time() - older_than_days * _DAY_S
    for number in _all_but_last(project, keep_last or 0):
        entries = [store.entry(number, path) for path in store.rollout_files(number)]
        if before is not None and any(entry.written_at > before for entry in entries):
            continue
        if entries and number in protected:
            report.protected.append(number)
            continue
        retired = _try(report, partial(retire_round, store, number, archive=archive, dry_run=dry_run))
        if retired is not None:
            report.retirements.append(retired)
    _sweep_all(project, report, grace_s)
    return report


def champion_rounds(project: Project, registry: "ModelRegistry") -> set[int]:
    """Rounds that the champion and its ancestors were trained on; empty before the first promotion."""
    champion = registry.champion()
    if champion is None:
        return set()
    return {number for manifest in chain(champion.folder) for number in _rounds_read(manifest.lineage)}


def _rounds_read(lineage: Mapping[str, Any]) -> set[int]:
    """Rounds whose rows a training read."""
    return {int(number) for number in lineage.get("row_selection", {}).get("judge_versions", ())}


def _all_but_last(project: Project, keep_last: int) -> list[int]:
    if keep_last < 0:
        raise UserError(f"rounds to keep: {keep_last}, expected 0 or more")
    closed = closed_rounds(project)
    return closed[: max(0, len(closed) - keep_last)]


def _sweep_all(project: Project, report: Upkeep, grace_s: float) -> None:
    store, mirror = project.store, mirror_of(project.home.root)
    for number in store.rounds():
        freed = _try(report, partial(sweep_round, store, number, grace_s=grace_s, dry_run=report.dry_run))
        report.freed_bytes += freed or 0
    if mirror is not None:
        if not report.dry_run:
            _try(report, mirror.commit)
        try:
            report.orphans, freed = mirror.remove_orphans(dry_run=report.dry_run)
            report.freed_bytes += freed
        except TransientError as error:  # a process of this home is uploading; the next maintenance removes them
            LOG.warning("objects of interrupted uploads are not removed now: %s", error)
        except (UserError, StoreTakenError) as error:
            report.problems += [] if str(error) in report.problems else [str(error)]


def _try(report: Upkeep, work: Callable[[], _Done]) -> _Done | None:
    """Run ``work`` for one round; record a StorageError in the report, so that the other rounds are still processed."""
    try:
        return work()
    except StorageError as error:
        if str(error) not in report.problems:
            report.problems.append(str(error))
        return None
