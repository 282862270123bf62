"""Detect damaged files on read, quarantine them, and regenerate those that nothing else depends on."""

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rft_platform.common.digests import MANIFEST, THINNED, checkpoint_damage, digest_weights
from rft_platform.common.errors import DamagedError, DamageRepairedError, StorageError, UserError, WeightMismatchError
from rft_platform.common.files import write_json
from rft_platform.common.recorded_paths import CHECKPOINT_PREFIX
from rft_platform.experience.file_ledger import ROLLOUTS
from rft_platform.experience.file_names import round_key
from rft_platform.experience.integrity import DamagedFile
from rft_platform.experience.store import ExperienceStore
from rft_platform.model_registry.manifests import Manifest, read_manifest
from rft_platform.object_store.mirror import fetch_missing, mirror_of, removing, restore_stored
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Explored,
    Judged,
    Policy,
    RoundEvaluation,
    Trained,
    published,
    read,
    set_aside,
    withdraw,
)

LOG = logging.getLogger(__name__)
ASIDE = "aside"


@contextmanager
def repair_on_failure(project: Project, policy: Policy) -> Iterator[None]:
    """If the body fails on the weights of ``policy``, check its checkpoint for damage and repair it.

    Raises the errors of ``repair_checkpoint``, or the body's own error if the checkpoint is intact. Raises DamagedError
    before the body if the policy's note contradicts an intact checkpoint.
    """
    refuse_contradiction(project, policy)
    try:
        yield
    except (StorageError, UserError, WeightMismatchError):
        repair_checkpoint(project, policy)
        raise


def repair_checkpoint(project: Project, policy: Policy) -> None:
    """Quarantine the policy's checkpoint if it is damaged; do nothing if it is intact. Reads every byte of it.

    Files of which the project's object store has the intact ones are restored first.
    Raises DamageRepairedError after it moved a damaged checkpoint and withdrew the notes that depend on it, so that the
    plan makes it again. Raises StorageError if later rounds were trained from it (the error names them), or if it is a
    base model, which cannot be made again.
    """
    folder, why = Path(policy.folder), damage_of(policy)
    if why is not None and project.checkpoints in folder.parents and restore_stored(folder):
        why = damage_of(policy)
    if why is None:
        return
    sharing, dependents = _rounds_of(project.store, policy)
    if project.checkpoints not in folder.parents:
        raise StorageError(f"base model {folder}: {why}: restore the model that the project was started with")
    if dependents:
        raise StorageError(
            f"checkpoint {folder} is damaged: {why}. It is not trained again, because {_named(dependents)} "
            "were trained after it: restore the folder from a copy, or start a new project from a later checkpoint"
        )
    target = _set_aside(project, policy, sharing, why)
    maker = sharing[0] if sharing else policy.round
    made_by = "the warm start" if maker == 0 else f"the training of {round_key(maker)}"
    LOG.warning("checkpoint %s is damaged (%s): set aside as %s", folder, why, target)
    raise DamageRepairedError(
        f"checkpoint {folder} is damaged: {why}; it was set aside as {target}, and {made_by} is repeated"
    )


def refuse_contradiction(project: Project, policy: Policy) -> None:
    """Raise DamagedError if the policy's note is the wrong file in a contradiction with the checkpoint's manifest.

    Reads the manifest, and the weights only if the two contradict each other.
    """
    found = contradiction(project, policy)
    if found is not None and found.path.name != MANIFEST:
        raise DamagedError(f"{found.path}: {found.why}")


def contradiction(project: Project, policy: Policy) -> DamagedFile | None:
    """The wrong file if a policy's note and its checkpoint's manifest differ; None if they agree.

    The manifest is right if its weights digest is that of the weights on disk and its version is that of the folder's
    name. An unreadable manifest is not a contradiction.
    """
    folder = Path(policy.folder)
    fetch_missing(folder)
    if not (folder / MANIFEST).is_file():
        return None
    try:
        manifest = read_manifest(folder)
    except StorageError:
        return None
    noted, made = {"weights_digest": policy.weights_digest}, {"weights_digest": manifest.weights_digest}
    if policy.policy_version:  # the start is version 0 after any number of warm-start steps
        noted["policy_version"], made["policy_version"] = str(policy.policy_version), str(manifest.policy_version)
    differing = [name for name in noted if noted[name] != made[name]]
    if not differing:
        return None
    note = read(project.store, policy.round).file(Policy, policy.name)
    if _describes(manifest, folder):
        said = ", ".join(f"{name} is {noted[name]}, expected {made[name]}" for name in differing)
        return DamagedFile(note, f"contradicts {folder / MANIFEST}: {said}; restore the note from a copy")
    said = ", ".join(f"{name} is {made[name]}, expected {noted[name]}" for name in differing)
    return DamagedFile(folder / MANIFEST, f"contradicts {note}: {said}; restore the checkpoint from a copy")


def _describes(manifest: Manifest, folder: Path) -> bool:
    """Whether a manifest agrees with its folder's name and with the weights in it, if they still exist."""
    if folder.name != f"{CHECKPOINT_PREFIX}{manifest.policy_version}":
        return False
    try:
        return (folder / THINNED).exists() or digest_weights(folder) == manifest.weights_digest
    except (UserError, OSError):
        return False


def repeat_unstored(project: Project) -> None:
    """After a home took over the project from its object store: bring the newest weights and those of the start here.

    The notes of trainings whose checkpoint the other home had not stored yet are withdrawn, so that the plan repeats
    them from the stored rows.
    """
    mirror, store = mirror_of(project.home.root), project.store
    if mirror is None:
        return
    for name in project.policies:
        for number in reversed(store.rounds()):
            policy = published(store, number, name)
            if policy is None:
                continue
            folder = Path(policy.folder)
            if project.checkpoints not in folder.parents or store.is_stored(folder / MANIFEST):
                mirror.fetch([folder] if project.checkpoints in folder.parents else [])
                break
            LOG.warning("checkpoint %s was not stored: the training of %s is repeated", folder, round_key(number))
            for part in (RoundEvaluation, Policy, Trained):
                withdraw(store, number, part, name)


def refuse_damaged_rows(store: ExperienceStore, round_number: int, needed: type[Explored | Judged]) -> None:
    """Quarantine the round's damaged Parquet files. Reads every byte of them. Those of which the project's object store
    has the intact one are restored instead.

    The quarantine withdraws the parts that depend on a file. If ``needed`` is among them (``Explored`` before
    judging, ``Judged`` before training), raises DamageRepairedError: the plan then explores the round again. If the
    rollouts or the judgement in force of a trained round are damaged, raises StorageError: the plan does not repeat a
    trained round. Other damage is logged as a warning.
    """
    found = [file for file in store.damaged(round_number, digest=True) if not store.restore(round_number, file.path)]
    if not found:
        return
    trained, had = published(store, round_number) is not None, read(store, round_number).has(needed)
    in_force = store.in_force_file(round_number)  # read before the move below takes it out of force
    read_by_training = [file for file in found if file.path.parent.name == ROLLOUTS or file.path == in_force]
    for file in found:
        set_aside(store, round_number, file)
        LOG.warning("%s %s: set aside", file.path, file.why)
    key = round_key(round_number)
    if trained and read_by_training:
        job = "explore_job" if any(file.path.parent.name == ROLLOUTS for file in read_by_training) else "judge_job"
        raise StorageError(
            f"{_listed(read_by_training)}; set aside. {key} was trained on it: to create it again, launch {job} for "
            f"{key}"
        )
    if had and not read(store, round_number).has(needed):
        raise DamageRepairedError(f"{_listed(found)}; set aside, and the exploration of {key} is repeated")


def _listed(files: Sequence[DamagedFile]) -> str:
    return "; ".join(f"{file.path} {file.why}" for file in files)


def damage_of(policy: Policy) -> str | None:
    """What is wrong with a policy's weights on disk; None if they are the published weights."""
    folder = Path(policy.folder)
    fetch_missing(folder)
    if _is_checkpoint(folder):
        return checkpoint_damage(folder)
    try:
        unchanged = digest_weights(folder) == policy.weights_digest
    except (UserError, OSError) as error:
        return str(error)
    return None if unchanged else "its weights are not those that the project was started with"


def _is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint of the platform, which may have lost its manifest, and not a base model."""
    return folder.name.startswith(CHECKPOINT_PREFIX) or (folder / MANIFEST).exists()


def _rounds_of(store: ExperienceStore, policy: Policy) -> tuple[list[int], list[int]]:
    """The rounds that share a checkpoint (its maker and no-op rounds), and the other rounds trained since.

    The latter descend from the checkpoint, unless the gate refused it and they started again from an earlier one.
    """
    folders = {number: one.folder for number in store.rounds() if (one := published(store, number, policy.name))}
    sharing = [number for number, folder in folders.items() if folder == policy.folder]
    first = min(sharing, default=policy.round)
    return sharing, [number for number in folders if number > first and number not in sharing]


def _set_aside(project: Project, policy: Policy, rounds: list[int], why: str) -> Path:
    """Withdraw the notes of ``rounds``, then move the checkpoint's folder, so that no note names a missing folder."""
    folder = Path(policy.folder)
    for number in reversed(rounds):
        for part in (RoundEvaluation, Policy, Trained):  # after a crash at any point, the plan still syncs the round
            withdraw(project.store, number, part, policy.name)
    # The name must not start with the prefix of checkpoints: lineage reads every folder with this prefix.
    target = project.checkpoints / ASIDE / f"damaged.{folder.name}.{secrets.token_hex(3)}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with removing(folder):
        if folder.is_dir():
            folder.rename(target)
    write_json(target.with_name(f"{target.name}.why.json"), {"folder": str(folder), "why": why})
    return target


def _named(rounds: list[int]) -> str:
    first, last = round_key(rounds[0]), round_key(rounds[-1])
    return f"the weights of {first}" if len(rounds) == 1 else f"the weights of {first} to {last}"
