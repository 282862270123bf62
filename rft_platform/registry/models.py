"""The model registry: every checkpoint a version, ``champion`` the one that passed its gate."""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rft_platform.checkpoint_files import checkpoint_damage, digest_once
from rft_platform.errors import DamagedError, RegistryLostError, StorageError, UserError
from rft_platform.redaction import redact
from rft_platform.registry.store import check_name, is_server, open_client
from rft_platform.registry.tracking import TrainingRun
from rft_platform.sqlite_files import database_file

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

CHAMPION = "champion"
CANDIDATE = "candidate"
CHECKPOINT_TAG = "checkpoint"  # the folder, whatever MLflow holds as the source
DIGEST_TAG = "weights_digest"
PREVIOUS_TAG = "previous_champion"
_SKIPPED = "skipped"  # source of a version that is made to be deleted
MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[\w\-]+)|/(?P<version>\d+))")


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """One registered version: the folder of its weights and what is known about their making."""

    name: str
    version: int
    folder: Path
    tags: dict[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    run_id: str | None = None

    @property
    def uri(self) -> str:
        """``models:/NAME/VERSION``."""
        return f"models:/{self.name}/{self.version}"


@dataclass(frozen=True, slots=True)
class NotedVersion:
    """A model version that a project was told when it registered a checkpoint, and the note that holds it."""

    version: int
    weights_digest: str
    note: Path


#: The newest version that the project has noted of one of its policies (None: the first); None where it has none.
Noted: TypeAlias = Callable[[str | None], NotedVersion | None]


class ModelRegistry:
    """A project's MLflow: one experiment, one registered model.

    ``tracking_uri`` is ``sqlite:///FILE`` or a server's URL; ``artifact_root`` the folder for artifacts (None: the
    server's own). With ``noted`` every call raises RegistryLostError where MLflow lacks the version that it names:
    a new database in place of a lost one would number the versions anew and have no champion. Nothing is imported or
    opened before the first call; instances may be shared between threads.
    """

    def __init__(
        self,
        tracking_uri: str,
        artifact_root: Path | None,
        project: str,
        model_name: str,
        noted: Noted | None = None,
        policy: str | None = None,
    ) -> None:
        self.tracking_uri = tracking_uri
        self.artifact_root = artifact_root
        self.project = check_name(project, "project")
        self.model_name = check_name(model_name, "model name")
        self._noted = noted
        self._policy = policy
        self._lock = threading.Lock()
        self._opened: tuple[MlflowClient, str] | None = None
        self._siblings: dict[str, ModelRegistry] = {}

    def sibling(self, policy: str) -> "ModelRegistry":
        """The same for the model of another policy of the project, which is called as this one and ``policy``."""
        with self._lock:
            if policy not in self._siblings:
                name = f"{self.model_name}-{policy}"
                self._siblings[policy] = ModelRegistry(
                    self.tracking_uri, self.artifact_root, self.project, name, self._noted, policy
                )
            return self._siblings[policy]

    def prepare(self) -> str:
        """Open the store, and make it if it is new; returns the experiment's id.

        The first time costs seconds, nearly all of it importing and migrating: call it in a thread while an engine
        starts, and the first round does not wait.
        """
        return self._open()[1]

    def training_run(self, name: str, tags: Mapping[str, str] | None = None) -> TrainingRun:
        """The MLflow run of the training ``name``: a new one the first time, afterwards the same one continued."""
        client, experiment_id = self._open()
        return TrainingRun.find_or_create(client, experiment_id, check_name(name, "training run"), tags or {})

    def register_checkpoint(
        self, folder: Path, policy_version: int, tags: Mapping[str, Any], run_id: str | None = None
    ) -> int:
        """Register the checkpoint ``folder`` as a model version; returns its number. The newest is ``candidate``.

        ``tags`` must hold ``weights_digest``: the same folder with the same weights is the same version, whoever
        registers it again. Tags that are None are left out.
        """
        if not tags.get(DIGEST_TAG):
            raise ValueError(
                f"tags of a checkpoint need {DIGEST_TAG!r}, by which it is found again; got {sorted(tags)}"
            )
        folder = folder.absolute()
        client = self._open()[0]
        version = self.find(folder, str(tags[DIGEST_TAG])) or self._create(client, folder, policy_version, tags, run_id)
        candidate = self._by_alias(self.model_name, CANDIDATE)
        if candidate is None or candidate.version < version:
            client.set_registered_model_alias(self.model_name, CANDIDATE, str(version))
        return version

    def find(self, folder: Path, digest: str) -> int | None:
        """The version that was registered of ``folder`` with these weights, if there is one."""
        condition = f"name = '{self.model_name}' and tags.`{DIGEST_TAG}` = '{digest}'"
        found = self._open()[0].search_model_versions(condition, max_results=1000)
        return next((int(version.version) for version in found if _folder(version) == folder.absolute()), None)

    def skip_version(self) -> int:
        """Use up the next version number, and return it: MLflow numbers versions itself and never reuses a number."""
        client = self._open()[0]
        version = client.create_model_version(self.model_name, source=_SKIPPED, await_creation_for=0).version
        client.delete_model_version(self.model_name, str(version))
        return int(version)

    def set_champion(self, version: int) -> None:
        """Point the alias ``champion`` at a version that was promoted before; ``promote`` is for a new champion."""
        self._open()[0].set_registered_model_alias(self.model_name, CHAMPION, str(version))

    def model_tag(self, name: str) -> str | None:
        """A tag of the registered model, as opposed to one of its versions."""
        value = self._open()[0].get_registered_model(self.model_name).tags.get(name)
        return None if value is None else str(value)

    def set_model_tag(self, name: str, value: str | None) -> None:
        """Set a tag of the registered model; None removes it."""
        client = self._open()[0]
        if value is not None:
            client.set_registered_model_tag(self.model_name, name, value)
        elif self.model_tag(name) is not None:
            client.delete_registered_model_tag(self.model_name, name)

    def annotate(self, version: int, tags: Mapping[str, Any]) -> None:
        """Add tags to a version, such as what its evaluation and its gate said."""
        client = self._open()[0]
        for name, value in tags.items():
            client.set_model_version_tag(self.model_name, str(version), name, str(value))

    def champion(self) -> RegisteredModel | None:
        """The promoted version, or None before the first promotion."""
        return self._by_alias(self.model_name, CHAMPION)

    def promote(self, version: int) -> None:
        """Make ``version`` the champion. Only for a version that passed the evaluation gate."""
        current = self.champion()
        if current is not None and current.version == version:
            return
        previous = {} if current is None else {PREVIOUS_TAG: current.version}
        self.annotate(version, {"promoted_at": _now(), **previous})
        self._open()[0].set_registered_model_alias(self.model_name, CHAMPION, str(version))

    def rollback(self) -> RegisteredModel:
        """Make the champion's predecessor champion again, and return it; repeated calls go further back.

        Raises as ``last_promoted``.
        """
        current, client = self.last_promoted(), self._open()[0]
        client.set_registered_model_alias(self.model_name, CHAMPION, current.tags[PREVIOUS_TAG])
        client.delete_model_version_tag(self.model_name, str(current.version), PREVIOUS_TAG)
        self.annotate(current.version, {"rolled_back_at": _now()})
        return self.resolve(f"models:/{self.model_name}@{CHAMPION}")

    def last_promoted(self) -> RegisteredModel:
        """The champion that ``rollback`` would replace; raises UserError where it has no predecessor."""
        current = self.champion()
        if current is None or PREVIOUS_TAG not in current.tags:
            found = "there is no champion" if current is None else f"version {current.version} is the first champion"
            raise UserError(f"rollback of {self.model_name}: {found}; nothing to go back to. Promote a version first")
        return current

    def resolve(self, uri: str, *, verify: bool = False) -> RegisteredModel:
        """The version behind ``models:/NAME@alias`` or ``models:/NAME/3``, its folder checked to exist.

        With ``verify`` its files are compared with the digests in its manifest, once a process while they do not
        change: for whoever is about to load them. Raises ``UserError`` for an address that names nothing,
        ``StorageError`` when the weights are gone, ``DamagedError`` when they are not what was registered.
        """
        match = MODEL_URI.fullmatch(uri)
        if match is None:
            raise UserError(f"model address {uri!r}: expected models:/NAME@alias or models:/NAME/3")
        name = match["name"]
        found = self._by_alias(name, match["alias"]) if match["alias"] else self._by_number(name, match["version"])
        if found is None:
            raise UserError(f"model address {uri!r}: no such version in {self.tracking_uri}; {self._what_exists(name)}")
        if not found.folder.is_dir():
            raise StorageError(f"{uri} is version {found.version}, but its folder {found.folder} does not exist")
        why = checkpoint_damage(found.folder, digest_once) if verify else None
        if why is not None:
            raise DamagedError(
                f"{uri} is version {found.version} in {found.folder}, which is damaged: {why}; restore that folder or "
                "name another version"
            )
        return found

    def versions(self) -> list[RegisteredModel]:
        """All versions of the project's model, oldest first."""
        return self._all_versions(self.model_name)

    def _open(self) -> tuple["MlflowClient", str]:
        with self._lock:
            if self._opened is None:
                noted = None if self._noted is None else self._noted(self._policy)
                if noted is not None:
                    self._refuse_missing_file(noted)
                client = open_client(self.tracking_uri)
                if noted is not None:
                    self._refuse_unknown(client, noted)
                self._opened = client, self._make_project(client)
            return self._opened

    def _refuse_missing_file(self, noted: NotedVersion) -> None:
        """Before the database would be made anew."""
        file = database_file(self.tracking_uri)
        if file is not None and not file.exists():
            raise lost(f"{file} does not exist", noted, self.model_name)

    def _refuse_unknown(self, client: "MlflowClient", noted: NotedVersion) -> None:
        from mlflow.exceptions import MlflowException

        try:
            known = client.get_model_version(self.model_name, str(noted.version)).tags.get(DIGEST_TAG)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            known = None
        if known != noted.weights_digest:
            has = "does not know this version" if known is None else "has other weights under this version"
            raise lost(f"MLflow {redact(self.tracking_uri)} {has}", noted, self.model_name)

    def _make_project(self, client: "MlflowClient") -> str:
        """The experiment's id; creates the experiment and the registered model where they are missing."""
        from mlflow.exceptions import MlflowException

        try:
            client.create_registered_model(self.model_name, description=f"Checkpoints of the project {self.project}.")
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        location = None
        if self.artifact_root is not None:
            location = (self.artifact_root / self.project).absolute().as_uri()
        try:
            return str(client.create_experiment(self.project, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(self.project)
        if experiment.lifecycle_stage == "deleted":
            client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

    def _create(
        self, client: "MlflowClient", folder: Path, policy_version: int, tags: Mapping[str, Any], run_id: str | None
    ) -> int:
        every = {**tags, "policy_version": policy_version, CHECKPOINT_TAG: folder}
        created = client.create_model_version(
            self.model_name,
            source=self._source(folder, run_id),
            run_id=run_id,
            tags={name: str(value) for name, value in every.items() if value is not None},
            await_creation_for=0,
        )
        return int(created.version)

    def _source(self, folder: Path, run_id: str | None) -> str:
        """The folder; but a server refuses folders of this machine, so there the run stands as the source."""
        if is_server(self.tracking_uri) and run_id is not None:
            return f"runs:/{run_id}/checkpoints/{folder.name}"
        return str(folder)

    def _all_versions(self, name: str) -> list[RegisteredModel]:
        """Oldest first. A search leaves the aliases out, so they are asked for apart."""
        client = self._open()[0]
        versions, token = [], None
        while True:
            page = client.search_model_versions(f"name = '{name}'", max_results=1000, page_token=token)
            versions += page
            token = page.token
            if not token:
                break
        if not versions:
            return []
        aliases = client.get_registered_model(name).aliases
        found = [_registered(version, [a for a, v in aliases.items() if v == version.version]) for version in versions]
        return sorted(found, key=lambda version: version.version)

    def _by_alias(self, name: str, alias: str) -> RegisteredModel | None:
        return self._look_up(lambda client: client.get_model_version_by_alias(name, alias))

    def _by_number(self, name: str, version: str) -> RegisteredModel | None:
        return self._look_up(lambda client: client.get_model_version(name, version))

    def _look_up(self, ask: Callable[["MlflowClient"], "ModelVersion"]) -> RegisteredModel | None:
        from mlflow.exceptions import MlflowException

        try:
            version = ask(self._open()[0])
            return _registered(version, version.aliases)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def _what_exists(self, name: str) -> str:
        known = self._all_versions(name)
        if not known:
            return f"{name} has no versions"
        aliases = sorted(alias for found in known for alias in found.aliases)
        return f"{name} has versions {known[0].version}..{known[-1].version} and aliases {', '.join(aliases) or 'none'}"


def lost(what: str, noted: NotedVersion, model_name: str) -> RegistryLostError:
    """The error of a registry that lacks a version which a note names; ``what`` is wrong with it."""
    return RegistryLostError(
        f"{what}, but {noted.note} names version {noted.version} of model {model_name}: bring MLflow's database back "
        "(or correct its address), or run `rft models rebuild`, which registers the project's checkpoints again"
    )


def _registered(version: "ModelVersion", aliases: Sequence[str]) -> RegisteredModel:
    return RegisteredModel(
        name=version.name,
        version=int(version.version),
        folder=_folder(version),
        tags=dict(version.tags),
        aliases=tuple(sorted(aliases)),
        run_id=version.run_id or None,
    )


def _folder(version: "ModelVersion") -> Path:
    return Path(version.tags.get(CHECKPOINT_TAG, version.source))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
