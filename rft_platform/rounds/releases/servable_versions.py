"""The versions of a project that can serve, or were withdrawn from production; release commands for them.

An imported version was trained by another project, and is copied with its origin. It belongs to no round: rounds
continue from the project's own weights, and calls that the imported version answers are not trained on. Its policy
version is above those of all rounds.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.cluster.local.locks import locked
from rft_platform.common.digests import checkpoint_damage
from rft_platform.common.errors import DamagedError, UserError
from rft_platform.common.files import atomic_path, digest_file, read_json, write_json
from rft_platform.common.policy_names import stored_name
from rft_platform.model_registry.manifests import Manifest, read_manifest
from rft_platform.model_registry.models import version_tags
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, decoded, encoded, parent_round, published, read
from rft_platform.rounds.reporting.round_history import evaluation_of
from rft_platform.rounds.selection.production_rows import traffic_database, traffic_store
from rft_platform.serving.database import FIRST_IMPORTED
from rft_platform.serving.release_commands import ReleaseCommands, ServableVersion
from rft_platform.serving.release_store import ReleaseStore
from rft_platform.serving.rules.round_rows import ChosenRows, RoundRule

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry

NO_ROUND = -1  #: round of an imported policy
MODEL = "imported"  #: the registered model is called ``<model name>-imported``
_NOTE = "version.json"
_NOT_COPIED = shutil.ignore_patterns("trainer_state")
_SAME = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers")  # keys of config.json


def release_commands(project: Project) -> ReleaseCommands:
    """The commands that release or withdraw versions of an online project. Raises UserError for any other project."""
    if not project.config.online:
        raise UserError("this project serves no production traffic: start one with `rft serve`")
    store, automatic = ReleaseStore(traffic_database(project)), project.config.service.canary_share > 0
    return ReleaseCommands(store, lambda: servable_versions(project), automatic)


def pinned_version(project: Project) -> str | None:
    """Why newly released versions of an online project do not serve, and the command that ends this; else None."""
    return release_commands(project).pinned() if project.config.online else None


def servable_versions(project: Project) -> list[ServableVersion]:
    """The versions that can serve, oldest first. A round that trained nothing publishes its parent's version again."""
    found: dict[int, ServableVersion] = {}
    for policy in _newest_first(project):
        result = evaluation_of(project.store, policy.round)
        scores = {} if result is None else result.summary()
        found[policy.policy_version] = ServableVersion(
            policy.policy_version, policy.round, policy.model_version, is_released(project, policy), scores
        )
    for policy in imported_policies(project):
        found[policy.policy_version] = ServableVersion(policy.policy_version, None, policy.model_version, False, {})
    return sorted(found.values(), key=lambda version: version.version)


def is_released(project: Project, policy: Policy) -> bool:
    """Whether a policy may serve without a user's decision.

    With held-out tasks, the evaluation must have promoted the policy; without them, its round must have ended. The
    starting policy may always serve. A host that only serves follows the decision of the host that trains
    (``rounds.exchange``).
    """
    evaluated = read(project.store, policy.round).evaluated
    if evaluated is not None and evaluated.released is not None:
        return evaluated.released
    gated = bool(project.config.buffer.explorer_input.eval_tasksets)
    return policy.round == 0 or (evaluated is not None and (not gated or evaluated.promoted))


def released_policy(project: Project) -> Policy | None:
    """The newest released policy; None before the first one, when the engine serves the base model."""
    return next((policy for policy in _newest_first(project) if is_released(project, policy)), None)


def next_choice(project: Project) -> ChosenRows:
    """The committed rows of production traffic that the next round would take now, and those it would leave out."""
    return traffic_store(project).next_choice(round_rule(project))


def training_pause(project: Project) -> str | None:
    """The alerts that pause the training (``service.pause_training_on_alert``) in words; None: it is not paused."""
    if not project.config.service.pause_training_on_alert:
        return None
    alerts = traffic_store(project).open_alerts(pausing=True)
    return "; ".join(f"{text} (service.alerts.{name})" for name, text in alerts.items()) or None


def round_rule(project: Project) -> RoundRule:
    """How the next round chooses its rows among the committed ones."""
    service = project.config.service
    return RoundRule(
        project.batches.experiences_a_round,
        oldest_trainable(project),
        service.most_choices,
        service.task_share,
        service.subject_share,
        service.tenant_share,
    )


def oldest_trainable(project: Project) -> int | None:
    """The oldest policy version whose rows the next round may train on; None: of any version.

    The largest age (``synchronizer.max_staleness``) counts from the project's version that serves; if none serves,
    from the newest released one. Traffic has no rows of newer versions.
    """
    limit = project.config.synchronizer.max_staleness
    if limit is None:
        return None
    serving = serving_policy(project)
    return None if serving is None else serving.policy_version - limit


def serving_policy(project: Project) -> Policy | None:
    """The project's own policy that serves, by a decision or as the newest released one; offline: the champion.

    None before the first one. While an imported version serves, it is the newest released policy.
    """
    served = ReleaseStore(traffic_database(project)).served() if project.config.online else None
    own = served is not None and served <= FIRST_IMPORTED
    return (policy_of_version(project, served or 0) if own else None) or released_policy(project)


def policy_of_version(project: Project, version: int) -> Policy | None:
    """The published or imported policy with this policy version."""
    known = imported_policies(project) if version > FIRST_IMPORTED else _newest_first(project)
    return next((policy for policy in known if policy.policy_version == version), None)


def withdrawn_versions(project: Project) -> dict[int, str]:
    """What withdrew each withdrawn policy version of an online project, as a clause: "canary 3 withdrew version 16".

    A version that was trained from a withdrawn one counts as withdrawn too, unless a decision chose it to serve. Such
    versions exist because a canary takes time: rounds train on while it runs.
    """
    if not project.config.online:
        return {}
    verdicts = ReleaseStore(traffic_database(project)).verdicts()
    found = {version: f"{by} withdrew version {version}" for version, by in verdicts.items() if by is not None}
    if not found:
        return {}  # without reading all rounds
    roots = {version: version for version in found}
    for number in project.store.rounds():
        policy = published(project.store, number)
        if number == 0 or policy is None:
            continue
        parent, version = published(project.store, parent_round(project.store, number)), policy.policy_version
        if parent is not None and parent.policy_version in roots and version not in verdicts:
            root = roots[version] = roots[parent.policy_version]
            found[version] = f"version {version} descends from version {root}, which {verdicts[root]} withdrew"
    return found


def _newest_first(project: Project) -> Iterator[Policy]:
    for number in sorted(project.store.rounds() or [0], reverse=True):
        policy = published(project.store, number)
        if policy is not None:
            yield policy


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
    run = models.training_run(stored_name(project.config.name, MODEL))  # a server accepts no version without a run
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
