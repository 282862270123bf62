"""Remove the weights of old checkpoints beyond ``trainer.max_checkpoints_to_keep``; their lineage is kept.

The manifest, the metrics of each step and a note on the removed files stay, so that the ancestry of later weights can
be traced. These policies keep all their files:

- the newest ones, and those at multiples of ``trainer.keep_every`` steps;
- the champion, its predecessor (for a rollback) and the starting policy, with the other policies of their rounds;
- the versions that serve production traffic, also as canary or in an A/B test, and the one that a roll-back serves;
- the policies that untrained rounds explore with;
- the newest policy whose trainer state is saved and all later ones, because a killed trainer repeats their trainings.
"""

import logging
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.common.digests import MANIFEST, THINNED, lacks_state
from rft_platform.common.files import write_json
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.model_registry.models import PREVIOUS_TAG
from rft_platform.object_store.mirror import mirror_of, removing
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Policy,
    parent_of,
    parent_round,
    published,
    read,
    snapshot_of,
)
from rft_platform.rounds.releases.released import serving_policy
from rft_platform.rounds.selection.row_selection import trained_through

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry

LOG = logging.getLogger(__name__)
_STEPS = "steps.json"
_DELAY_S = 3.0  # after this delay the next round's rollouts run, which write nothing for a while
DISCARDED = "discarded"  # folder, beside the checkpoints, that holds files until they are deleted


def thin_checkpoints(project: Project, registry: "ModelRegistry") -> list[Path]:
    """Remove the weights of policies beyond the limit; returns their folders. Without a limit nothing is removed."""
    if project.config.trainer.max_checkpoints_to_keep is None:
        return []
    champions = _with_partners(project, _champions(registry) | _in_production(project))
    thinned = [folder for name in project.policies for folder in _thin_policy(project, champions, name)]
    _delete_discarded(project)
    return thinned


def _thin_policy(project: Project, champions: set[Path], name: str) -> list[Path]:
    """``thin_checkpoints`` for one of the project's policies."""
    limit, every = project.config.trainer.max_checkpoints_to_keep, project.config.trainer.keep_every
    store = project.store
    policies = [policy for number in store.rounds() if (policy := published(store, number, name)) is not None]
    folders = list(dict.fromkeys(Path(policy.folder) for policy in policies))  # no-op rounds share their parent's
    marked = {Path(policy.folder) for policy in policies if every is not None and policy.policy_version % every == 0}
    repeatable = {Path(policy.folder) for policy in needed_to_repeat(project, name)}
    kept = {*folders[-(limit or 0) :], *marked, *champions, *in_use(project, name), *repeatable}
    old = [folder for folder in folders if folder not in kept and folder.parent == project.checkpoints_of(name)]
    stored = _stored(project, old)
    return [folder for folder in old if _thin(folder, project.checkpoints / DISCARDED, stored.get(folder, []))]


def _stored(project: Project, folders: Sequence[Path]) -> dict[Path, list[Path]]:
    """The files of checkpoints that the project's object store has, by folder."""
    mirror, found = mirror_of(project.home.root), dict[Path, list[Path]]()
    for path in [] if mirror is None or not folders else mirror.stored_below(project.checkpoints):
        for folder in set(path.parents).intersection(folders):
            found.setdefault(folder, []).append(path)
    return found


def _champions(registry: "ModelRegistry") -> set[Path]:
    champion = registry.champion()
    if champion is None:
        return set()
    before = champion.tags.get(PREVIOUS_TAG)
    previous = [] if before is None else [v for v in registry.versions() if str(v.version) == str(before)]
    return {version.folder for version in (champion, *previous)}


def _with_partners(project: Project, folders: set[Path]) -> set[Path]:
    """``folders`` of the first policy, with those of the other policies that the same rounds published."""
    if not project.config.policies:
        return folders
    rounds = [n for n in project.store.rounds() if (own := published(project.store, n)) and Path(own.folder) in folders]
    found = (published(project.store, number, name) for number in rounds for name in project.policies)
    return folders | {Path(policy.folder) for policy in found if policy is not None}


def _in_production(project: Project) -> set[Path]:
    """The folders of the versions that serve production traffic, or would after a roll-back.

    An engine that is restarted reads them again.
    """
    if project.traffic is None:
        return set()
    serving = [serving_policy(project), *project.traffic.policies_in_release()]
    return {Path(policy.folder) for policy in serving if policy is not None}


def in_use(project: Project, name: str = DEFAULT_POLICY) -> set[Path]:
    """The folders of the starting policy and of the policies that untrained rounds explore with or start again from."""
    store, start = project.store, published(project.store, 0, name)
    exploring = [n for n in store.rounds() if read(store, n).has_snapshot(name)]
    if project.config.synchronizer.dynamic:  # the next batch may continue with the newest
        through = trained_through(project)
        exploring = [n for n in exploring if n > through or n == exploring[-1]]
    else:
        exploring = [n for n in exploring if published(store, n) is None]
    used = {Path(snapshot_of(store, number, name).folder) for number in exploring}
    open_rounds = [n for n in store.rounds() if published(store, n, name) is None]
    used |= {Path(parent_of(store, n, name).folder) for n in open_rounds if read(store, n).started_again(name)}
    return used if start is None else used | {Path(start.folder)}


def needed_to_repeat(project: Project, name: str = DEFAULT_POLICY) -> list[Policy]:
    """Policies that a killed trainer needs to make the trainer state of the newest policy again, newest first.

    The list starts with the newest policy, continues with the policy that each one was trained from, and ends with the
    first policy whose trainer state is saved.
    """
    store, needed = project.store, []
    number = max((n for n in store.rounds() if published(store, n, name) is not None), default=-1)
    while number >= 0:
        policy = published(store, number, name)
        if policy is not None:
            needed.append(policy)
            if not lacks_state(Path(policy.folder)):
                break
        number = parent_round(store, number, name)
    return needed


def _delete_discarded(project: Project) -> None:
    """Delete the files that ``_thin`` moved to the folder ``DISCARDED``, in this process or an earlier one.

    A thread deletes them, because deleting gigabytes takes seconds and delays other writes. The thread waits until the
    next round explores or the main thread has ended. The process ends when the files are deleted.
    """
    discarded = project.checkpoints / DISCARDED
    found = list(discarded.iterdir()) if discarded.is_dir() else []
    if found:
        threading.Thread(target=_delete, args=(found,), name="delete-checkpoints").start()


def _delete(paths: Sequence[Path]) -> None:
    threading.main_thread().join(_DELAY_S)
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _thin(folder: Path, discarded: Path, stored: Sequence[Path]) -> bool:
    """Reduce one folder; False if there was nothing to remove. Completes an interrupted reduction.

    The removed files are moved to ``discarded``, on the same file system. ``stored`` are the files of the folder that
    the project's object store has: they are removed there, also those that are not here.
    """
    if not (folder / MANIFEST).is_file():
        return False
    kept = [folder / name for name in (MANIFEST, _STEPS, THINNED)]
    gone = [path for path in folder.iterdir() if path not in kept]
    stored = [path for path in stored if path not in kept]
    if not gone and not stored:
        return False
    why = "trainer.max_checkpoints_to_keep"
    if not (folder / THINNED).exists():
        write_json(folder / THINNED, {"removed_by": why, "removed_at": time.time()})
    discarded.mkdir(exist_ok=True)
    with removing(*gone, *stored):
        for path in gone:
            path.rename(discarded / f"removed.{folder.name}.{path.name}.{secrets.token_hex(4)}")
    LOG.info("removed the weights of %s (%s); its manifest stays", folder, why)
    return True
