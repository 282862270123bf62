"""The versions of a project that can serve, the release commands for them, and MLflow's alias of the one that serves.

An imported version was trained by another project, and is copied with its origin. It belongs to no round: rounds
continue from the project's own weights, and calls that the imported version answers are not trained on. Its policy
version is above those of all rounds.

MLflow's alias ``champion`` is the best version by its evaluation. Another version may serve: a roll-back, a canary, an
A/B test or a promotion by hand decides. These decisions are made by commands, over HTTP and by the service, also on a
host without MLflow; so the process of ``rft serve`` that trains reads the newest decision from the database and sets
the alias ``serving``.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.cluster.local.locks import locked
from rft_platform.common.digests import THINNED, checkpoint_damage
from rft_platform.common.errors import DamagedError, UserError
from rft_platform.common.files import atomic_path, digest_file, read_json, write_json
from rft_platform.common.threads import repeating
from rft_platform.model_registry.manifests import Manifest, read_manifest
from rft_platform.model_registry.models import version_tags
from rft_platform.object_store.mirror import mirror_of
from rft_platform.online.releases.commands import ReleaseCommands, ServableVersion
from rft_platform.online.releases.store import ReleaseStore
from rft_platform.online.traffic.database import FIRST_IMPORTED
from rft_platform.online.traffic.project_traffic import traffic_database
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, decoded, encoded
from rft_platform.rounds.releases.released import is_released, newest_first, own_policy, withdrawn_versions
from rft_platform.rounds.reporting.round_history import evaluation_of
from rft_platform.rounds.setup.connections import connect_registry

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry


NO_ROUND = -1  #: round of an imported policy
MODEL = "imported"  #: the registered model is called ``<model name>-imported``
_NOTE = "version.json"
_NOT_COPIED = shutil.ignore_patterns("trainer_state")
_SAME = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers")  # keys of config.json
_STEP_S = 2.0


def release_commands(project: Project) -> ReleaseCommands:
    """The commands that release or withdraw versions of an online project. Raises UserError for any other project."""
    if not project.config.online:
        raise UserError("this project serves no production traffic: start one with `rft serve`")
    store, automatic = ReleaseStore(traffic_database(project)), project.config.service.canary_share > 0
    return ReleaseCommands(
        store, lambda: servable_versions(project), automatic, lambda: withdrawn_versions(project).keys()
    )


def pinned_version(project: Project) -> str | None:
    """Why newly released versions of an online project do not serve, and the command that ends this; else None."""
    return release_commands(project).pinned() if project.config.online else None


def servable_versions(project: Project) -> list[ServableVersion]:
    """The versions that can serve, oldest first. A round that trained nothing publishes its parent's version again."""
    found: dict[int, ServableVersion] = {}
    for policy in newest_first(project):
        result = evaluation_of(project.store, policy.round)
        scores = {} if result is None else result.summary()
        found[policy.policy_version] = ServableVersion(
            policy.policy_version, policy.round, policy.model_version, is_released(project, policy), scores,
            _has_weights(project, Path(policy.folder)),
        )  # fmt: skip
    for policy in imported_policies(project):
        found[policy.policy_version] = ServableVersion(policy.policy_version, None, policy.model_version, False, {})
    return sorted(found.values(), key=lambda version: version.version)


def _has_weights(project: Project, folder: Path) -> bool:
    """Whether the weights of a version were not removed; a file may be missing here, and in the home's object store.

    A host that downloads the weights of another one removes the whole folder.
    """
    if (folder / THINNED).exists():
        return False
    return folder.is_dir() or project.checkpoints not in folder.parents or mirror_of(project.home.root) is not None


def policy_of_version(project: Project, version: int) -> Policy | None:
    """The published or imported policy with this policy version."""
    if version <= FIRST_IMPORTED:
        return own_policy(project, version)
    return next((policy for policy in imported_policies(project) if policy.policy_version == version), None)


def imported_policies(project: Project) -> list[Policy]:
    """The imported versions, oldest first."""
    found = [note for note in _folder(project).glob(f"*/{_NOTE}") if note.parent.name.isdecimal()]  # no temporary ones
    notes = sorted(found, key=lambda note: int(note.parent.name))
    policies = [(note, decoded(Policy, read_json(note)["policy"], project.home.root)) for note in notes]
    return [replace(policy, folder=str(note.parent)) for note, policy in policies]  # a note names no other folder


def import_checkpoint(project: Project, registry: "ModelRegistry | None", source: Path) -> Policy:
    """Copy a checkpoint of another project and register it; the same weights are imported once.

    If an earlier import copied the checkpoint but could not register it, a repeated import registers it.
    Raises UserError unless ``source`` is a checkpoint with full weights of this project's model, and DamagedError if it
    is damaged.
    """
    source = source.absolute()
    manifest = read_manifest(source)
    _check(project, source)
    folder = _folder(project)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "import"):
        known = imported_policies(project)
        found = next((policy for policy in known if policy.weights_digest == manifest.weights_digest), None)
        policy = found or _copy(project, manifest, len(known) + 1)
        return policy if registry is None else _register(project, registry, policy)


def _copy(project: Project, manifest: Manifest, number: int) -> Policy:
    target = _folder(project) / str(number)
    policy = Policy(str(target), FIRST_IMPORTED + number, manifest.weights_digest, NO_ROUND)
    origin = {"source": str(manifest.folder), "manifest_digest": digest_file(manifest.folder / "manifest.json")}
    with atomic_path(target) as temporary:
        shutil.copytree(manifest.folder, temporary, ignore=_NOT_COPIED)
        write_json(temporary / _NOTE, {"policy": encoded(policy, project.home.root), **origin})
    return policy


def _register(project: Project, registry: "ModelRegistry", policy: Policy) -> Policy:
    """Register a copied version and store the registry's number in its note; a registered version keeps its number."""
    folder = Path(policy.folder)
    note = read_json(folder / _NOTE)
    origin = {name: value for name, value in note.items() if name != "policy"}
    tags = {**version_tags(read_manifest(folder).lineage, policy.weights_digest), **origin}
    models = registry.of_policy(MODEL)
    run = models.training_run(project.config.name)  # a server accepts no version without a run
    version = models.register_checkpoint(folder, policy.policy_version, tags, run.run_id)
    registered = replace(policy, model_version=str(version))
    if registered != policy:
        write_json(folder / _NOTE, {"policy": encoded(registered, project.home.root), **origin})
    return registered


def _check(project: Project, source: Path) -> None:
    if not project.config.online:
        raise UserError("this project serves no production traffic: import into a project that `rft serve` serves")
    if (source / "adapter_config.json").exists():
        raise UserError(f"{source} holds a LoRA adapter: only full weights are imported")
    damage = checkpoint_damage(source)
    if damage is not None:
        raise DamagedError(f"checkpoint {source}: {damage}")
    config = Path(str(project.config.model.model_path)) / "config.json"
    if not config.exists():
        return  # the base model is not a folder: the engine refuses weights of another model
    ours, theirs = read_json(config), read_json(source / "config.json")
    wrong = [name for name in _SAME if ours.get(name) != theirs.get(name)]
    if wrong:
        raise UserError(
            f"{source} is another model: its {wrong[0]} is {theirs.get(wrong[0])}, that of {config.parent} is "
            f"{ours.get(wrong[0])}"
        )


def _folder(project: Project) -> Path:
    return project.checkpoints / "imported"


class ServingAlias:
    """Sets the alias when another version serves."""

    def __init__(self, project: Project, connect: "Callable[[Project], ModelRegistry]" = connect_registry) -> None:
        self._project = project
        self._connect = connect
        self._named: tuple[int, str | None] | None = None  # policy version and model version of the last alias

    def step(self) -> None:
        """Set the alias if another version serves than at the last call. MLflow is imported by the first one."""
        number = release_commands(self._project).status()["serving"]
        policy = None if number is None else policy_of_version(self._project, number)
        serving = None if policy is None else (policy.policy_version, policy.model_version)
        if policy is None or serving == self._named:
            return
        registry, imported = self._connect(self._project), policy.policy_version > FIRST_IMPORTED
        version = None if policy.model_version is None else int(policy.model_version)
        registry.set_serving(None if imported else version)
        if imported_policies(self._project):  # otherwise MLflow has no model of imported versions
            registry.of_policy(MODEL).set_serving(version if imported else None)
        self._named = serving


@contextmanager
def naming_the_serving_version(project: Project) -> Iterator[None]:
    """Keep the alias up to date in a thread during the block."""
    problem = "MLflow's alias `serving` cannot be set"
    with repeating(ServingAlias(project).step, _STEP_S, "serving-alias", problem):
        yield
