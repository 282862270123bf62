"""Rebuild a lost MLflow registry from the project's own records: checkpoint manifests and round notes.

Versions keep the numbers in the notes if MLflow can still assign them; otherwise the notes are changed to the new
numbers. A second rebuild changes nothing. Data that only MLflow had is lost: manual aliases, tags and runs.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import StorageError
from rft_platform.common.policy_names import DEFAULT_POLICY, stored_name
from rft_platform.model_registry.manifests import Manifest, all_manifests
from rft_platform.model_registry.models import CANDIDATE, CHAMPION, DIGEST_TAG, PREVIOUS_TAG, version_tags
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import all_figures, publish, published, read
from rft_platform.rounds.releases.servable_versions import MODEL as IMPORTED
from rft_platform.rounds.releases.servable_versions import imported_policies, register_imported
from rft_platform.rounds.reporting.run_log import link_version, log_training, record_evaluation, scores_of
from rft_platform.rounds.setup.connections import RegisteredPolicy, registered_policies

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry

_OPEN = "rft.rebuilding"  # tag of a model while its rebuild is incomplete


@dataclass(slots=True)
class Rebuilt:
    """The result of the rebuild for one model."""

    model: str
    registered: list[int] = field(default_factory=list)  # versions that MLflow lacked
    renumbered: dict[int, int] = field(default_factory=dict)  # number in the notes before -> now
    champion: int | None = None
    candidate: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def rebuild_registry(project: Project, registry: "ModelRegistry") -> list[Rebuilt]:
    """Register the versions that MLflow lacks for each policy's model, then metrics and aliases; one report per model.

    ``registry`` must be connected without the check for lost versions. Raises StorageError for a damaged manifest.
    """
    models = {name: registry.of_policy(name) for name in project.policies}
    reports = {name: _rebuild_versions(project, model, name) for name, model in models.items()}
    lost = [name for name, report in reports.items() if models[name].model_tag(_OPEN)]
    for name in lost:
        _log_trainings(project, models[name], name)
    if lost:
        _log_rounds(project, registry)
    _restore_champion(project, registry, reset=DEFAULT_POLICY in lost)
    for name, report in reports.items():
        report.champion, report.candidate = (_aliased(models[name], alias) for alias in (CHAMPION, CANDIDATE))
    for name in lost:
        models[name].set_model_tag(_OPEN, None)
    return [*reports.values(), *_rebuild_imported(project, registry)]


def _rebuild_versions(project: Project, registry: "ModelRegistry", name: str) -> Rebuilt:
    store, report = project.store, Rebuilt(registry.model_name)
    manifests = {manifest.folder: manifest for manifest in _manifests(project, name)}
    known = {version.version: version.tags.get(DIGEST_TAG) for version in registry.versions()}
    noted = registered_policies(store, name)
    missing = [one for one in noted if known.get(one.version) != one.policy.weights_digest]
    noted_folders = {Path(one.policy.folder) for one in noted}
    unnoted = [manifest for folder, manifest in manifests.items() if folder not in noted_folders]
    if not missing:
        return report
    registry.set_model_tag(_OPEN, "yes")  # lets a later call complete an interrupted rebuild
    run_id = registry.training_run(stored_name(project.config.name, name)).run_id
    free = max(known, default=0) + 1
    # First the versions that can keep their number; a number that is taken is replaced by a new one at the end.
    for one in sorted(missing, key=lambda one: (one.version < free, one.version)):
        policy, manifest = one.policy, manifests.get(Path(one.policy.folder))
        found = registry.find(Path(policy.folder), policy.weights_digest)
        while found is None and free < one.version:
            _fill(registry, one, unnoted, run_id)
            free += 1
        tags = version_tags({} if manifest is None else manifest.lineage, policy.weights_digest)
        version = registry.register_checkpoint(Path(policy.folder), policy.policy_version, tags, run_id)
        if found is None:
            report.registered.append(version)
            free = version + 1
        if version != one.version:
            report.renumbered[one.version] = version
            _renumber(project, one, version)
    return report


def _rebuild_imported(project: Project, registry: "ModelRegistry") -> list[Rebuilt]:
    """Register the imported versions that MLflow lacks; no report if the project has none."""
    if not imported_policies(project):
        return []
    model = registry.of_policy(IMPORTED)
    known = {version.version for version in model.versions()}
    register_imported(project, registry)
    missing = [version.version for version in model.versions() if version.version not in known]
    return [Rebuilt(model.model_name, missing, candidate=_aliased(model, CANDIDATE))]


def _fill(registry: "ModelRegistry", before: RegisteredPolicy, unnoted: list[Manifest], run_id: str) -> None:
    """Use up the next version number, which no note names, so that ``before`` can keep its number.

    Registers a checkpoint without a note; if there is none, creates a version and deletes it.
    """
    older = [manifest for manifest in unnoted if manifest.policy_version < before.policy.policy_version]
    if not older:
        registry.skip_version()
        return
    manifest = older[0]
    unnoted.remove(manifest)
    tags = version_tags(manifest.lineage, manifest.weights_digest)
    registry.register_checkpoint(manifest.folder, manifest.policy_version, tags, run_id)


def _manifests(project: Project, name: str) -> list[Manifest]:
    """Manifests of the published checkpoints. Deeper folders, of warm starts and quarantined ones, are not read."""
    folder = project.checkpoints_of(name)
    return [manifest for manifest in all_manifests(folder) if manifest.folder.parent == folder]


def _renumber(project: Project, one: RegisteredPolicy, version: int) -> None:
    for number in one.rounds:
        policy = published(project.store, number, one.policy.name)
        if policy is None:
            raise StorageError(f"round {number} has lost its policy note while the registry was rebuilt: run it again")
        publish(project.store, replace(policy, model_version=str(version)))


def _log_rounds(project: Project, registry: "ModelRegistry") -> None:
    """Log the metrics of judgements and evaluations, and the evaluation reports."""
    run = registry.training_run(project.config.name)
    for number in project.store.rounds():
        record, policy = read(project.store, number), published(project.store, number)
        if number and policy is not None:
            run.log_round(number, all_figures(record.judged) if record.judged else {}, prefix="round/")
        made = record.evaluated
        if made is not None and made.first is not None and policy is not None:
            scores = scores_of(made.first, made.compared)
            record_evaluation(project, registry, policy, scores, made.gate, made.results)


def _log_trainings(project: Project, registry: "ModelRegistry", name: str) -> None:
    """Log the steps, rows and LoggedModels of the trainings."""
    run = registry.training_run(stored_name(project.config.name, name))
    lineages = {manifest.folder: manifest.lineage for manifest in _manifests(project, name)}
    for number in project.store.rounds():
        trained, policy = read(project.store, number).trained(name), published(project.store, number, name)
        if trained is None or not trained.step_events:
            continue
        steps = trained.step_events
        if policy is None or policy.model_version is None:
            run.log_steps(steps)
            continue
        model_id = log_training(project, run, policy, lineages.get(Path(policy.folder), {}), steps)
        link_version(registry, run, model_id, int(policy.model_version))


def _restore_champion(project: Project, registry: "ModelRegistry", reset: bool) -> None:
    """Set the champion to the newest promotion in the notes, and tag each version with its predecessor."""
    champion = registry.champion()
    versions = list(_promoted(project))
    if not versions or (champion is not None and not reset):
        return
    for before, version in pairwise(versions):
        registry.annotate(version, {PREVIOUS_TAG: before})
    registry.set_champion(versions[-1])


def _promoted(project: Project) -> Iterator[int]:
    """Versions promoted by evaluations and not rolled back, oldest first, without repeating the last one."""
    last = None
    for number in project.store.rounds():
        policy, evaluated = published(project.store, number), read(project.store, number).evaluated
        promoted = evaluated is not None and evaluated.promoted
        if promoted and policy is not None and policy.model_version not in (None, last):
            last = policy.model_version
            yield int(last or 0)


def _aliased(registry: "ModelRegistry", alias: str) -> int | None:
    return next((found.version for found in registry.versions() if alias in found.aliases), None)
