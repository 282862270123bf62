"""The model registry: every checkpoint is a model version; the alias ``champion`` marks the promoted one."""

import difflib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rft_platform.common.database_urls import with_time_limits
from rft_platform.common.digests import checkpoint_damage, digest_once
from rft_platform.common.errors import DamagedError, RegistryLostError, StorageError, UserError
from rft_platform.common.policy_names import DEFAULT_POLICY, stored_name
from rft_platform.common.redaction import redact
from rft_platform.common.sqlite_files import backup_of, database_file
from rft_platform.model_registry.mlflow_client import back_up, check_name, is_server, open_client
from rft_platform.model_registry.mlflow_model import describe_checkpoint, upload_model
from rft_platform.model_registry.pages import run_link
from rft_platform.model_registry.tracking import TrainingRun
from rft_platform.object_store.mirror import fetch_missing

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

CHAMPION = "champion"
CANDIDATE = "candidate"
SERVING = "serving"  # alias of the version that answers production traffic
CHECKPOINT_TAG = "checkpoint"  # tag with the checkpoint folder; on a server, MLflow's source is not this folder
DIGEST_TAG = "weights_digest"
UPLOADED_TAG = "weights_uploaded"  # whether other machines can load the version from the server
PREVIOUS_TAG = "previous_champion"
LOGGED_MODEL_TAG = "logged_model"  # id of the LoggedModel with the same weights
#: For MLflow servers before 3.17, whose page of an experiment asks for its kind. Later ones ignore the tag (``pages``).
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
_HELD_OUT = {"sampled_pass": "of the sampled runs pass", "greedy_pass": "pass with greedy decoding"}
MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[\w\-]+)|/(?P<version>\d+))")


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """One registered version: the folder of its weights, its tags, aliases and run."""

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

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses of the version: by number, then by aliases."""
        return (self.uri, *(f"models:/{self.name}@{alias}" for alias in self.aliases))


@dataclass(frozen=True, slots=True)
class NotedVersion:
    """A model version that the project recorded when it registered a checkpoint, and the note that records it."""

    version: int
    weights_digest: str
    note: Path


#: Returns the newest recorded version of a policy of the project; None if there is none.
Noted: TypeAlias = Callable[[str], NotedVersion | None]


class ModelRegistry:
    """A project's MLflow: one experiment, one registered model.

    ``tracking_uri`` is ``sqlite:///FILE`` or a server's URL; ``artifact_root`` is the folder for artifacts (None: the
    server's own). With ``noted``, opening the store raises RegistryLostError if MLflow lacks the version that ``noted``
    returns: a new database instead of a lost one would number the versions from 1 and have no champion. The first call
    imports MLflow and opens the store. Threads may share an instance.
    """

    def __init__(
        self,
        tracking_uri: str,
        artifact_root: Path | None,
        project: str,
        model_name: str,
        noted: Noted | None = None,
        policy: str = DEFAULT_POLICY,
        upload_max_bytes: float = 0,
    ) -> None:
        """``upload_max_bytes``: checkpoints with at most this many bytes of weights are uploaded to a server."""
        self.tracking_uri = with_time_limits(tracking_uri)
        self.artifact_root = artifact_root
        self.project = check_name(project, "project")
        self.model_name = check_name(model_name, "model name")
        self._noted = noted
        self._policy = policy
        self._upload_max_bytes = upload_max_bytes
        self._lock = threading.Lock()
        self._opened: tuple[MlflowClient, str] | None = None
        self._siblings: dict[str, ModelRegistry] = {}
        self._run_ids: dict[str, str] = {}  # of the training runs that this process has looked up, by name

    def of_policy(self, policy: str) -> "ModelRegistry":
        """Return the registry of a policy of the project. ``self`` must be the registry of the first policy."""
        if policy == self._policy:
            return self
        with self._lock:
            if policy not in self._siblings:
                name = stored_name(self.model_name, policy)
                self._siblings[policy] = ModelRegistry(
                    self.tracking_uri,
                    self.artifact_root,
                    self.project,
                    name,
                    self._noted,
                    policy,
                    self._upload_max_bytes,
                )
            return self._siblings[policy]

    def prepare(self) -> str:
        """Open the store, creating it if it is new; return the experiment's id.

        The first call takes seconds, mostly for imports and migrations. Call it in a thread while an engine starts, so
        that the first round does not wait.
        """
        return self._open()[1]

    def training_run(self, name: str, tags: Mapping[str, str] | None = None) -> TrainingRun:
        """Return the MLflow run of this policy in the training ``name``; the first call creates it."""
        client, experiment_id = self._open()
        own = check_name(stored_name(name, self._policy), "training run")
        run = TrainingRun.find_or_create(client, experiment_id, own, tags or {})
        self._run_ids[name] = run.run_id
        return run

    def run_link(self, name: str) -> str:
        """Link to the MLflow page with the curves of the training ``name``."""
        return run_link(self._open()[1], self._run_ids.get(name) or self.training_run(name).run_id)

    def register_checkpoint(
        self, folder: Path, policy_version: int, tags: Mapping[str, Any], run_id: str | None = None
    ) -> int:
        """Register the checkpoint ``folder`` as a model version; return its number. The newest becomes ``candidate``.

        ``tags`` must contain ``weights_digest``: the same folder with the same weights is always the same version, also
        when it is registered again. Tags that are None are left out.
        """
        if not tags.get(DIGEST_TAG):
            raise ValueError(
                f"the tags of a checkpoint must contain {DIGEST_TAG!r}, which identifies it; got {sorted(tags)}"
            )
        folder = folder.absolute()
        client = self._open()[0]
        describe_checkpoint(folder)
        version = self.find(folder, str(tags[DIGEST_TAG]))
        if version is None:
            version = self._create(client, folder, policy_version, tags, run_id)
        else:
            self.annotate(version, {LOGGED_MODEL_TAG: tags.get(LOGGED_MODEL_TAG)})
        candidate = self._by_alias(self.model_name, CANDIDATE)
        if candidate is None or candidate.version < version:
            client.set_registered_model_alias(self.model_name, CANDIDATE, str(version))
        back_up(self.tracking_uri)
        return version

    def find(self, folder: Path, digest: str) -> int | None:
        """Return the version registered for ``folder`` with these weights, if there is one."""
        condition = f"name = '{self.model_name}' and tags.`{DIGEST_TAG}` = '{digest}'"
        found = self._open()[0].search_model_versions(condition, max_results=1000)
        return next((int(version.version) for version in found if _folder(version) == folder.absolute()), None)

    def set_serving(self, version: int | None) -> None:
        """Set the alias ``serving`` to the version that serves; None: no version of this model serves."""
        client, current = self._open()[0], self._by_alias(self.model_name, SERVING)
        if version is not None and (current is None or current.version != version):
            client.set_registered_model_alias(self.model_name, SERVING, str(version))
        elif version is None and current is not None:
            client.delete_registered_model_alias(self.model_name, SERVING)

    def annotate(self, version: int, tags: Mapping[str, Any]) -> None:
        """Add tags to a version, such as the results of its evaluation and gate. Tags that are None are left out."""
        client = self._open()[0]
        for name, value in tags.items():
            if value is not None:
                client.set_model_version_tag(self.model_name, str(version), name, str(value))
        self._describe(client.get_model_version(self.model_name, str(version)))

    def champion(self) -> RegisteredModel | None:
        """Return the promoted version, or None before the first promotion."""
        return self._by_alias(self.model_name, CHAMPION)

    def promote(self, version: int) -> None:
        """Make ``version`` the champion. Only for a version that passed the evaluation gate."""
        current = self.champion()
        if current is not None and current.version == version:
            return
        previous = {} if current is None else {PREVIOUS_TAG: current.version}
        self.annotate(version, {"promoted_at": _now(), **previous})
        self._open()[0].set_registered_model_alias(self.model_name, CHAMPION, str(version))
        back_up(self.tracking_uri)

    def rollback(self) -> RegisteredModel:
        """Make the champion's predecessor champion again and return it; repeated calls go further back.

        Raises the errors of ``last_promoted``, before anything is changed.
        """
        current, client = self.last_promoted(), self._open()[0]
        client.set_registered_model_alias(self.model_name, CHAMPION, current.tags[PREVIOUS_TAG])
        client.delete_model_version_tag(self.model_name, str(current.version), PREVIOUS_TAG)
        self.annotate(current.version, {"rolled_back_at": _now()})
        back_up(self.tracking_uri)
        return self.resolve(f"models:/{self.model_name}@{CHAMPION}")

    def last_promoted(self) -> RegisteredModel:
        """Return the champion that ``rollback`` would replace.

        Raises UserError if it has no predecessor, and, like ``resolve``, StorageError or DamagedError if the
        predecessor's weights are gone: only the newest predecessor is safe from ``trainer.max_checkpoints_to_keep``.
        """
        current = self.champion()
        if current is None or PREVIOUS_TAG not in current.tags:
            first = None if current is None else f"model version {current.version} is the first champion"
            raise UserError(
                f"rollback of {self.model_name}: {first or 'there is no champion'}; there is no previous champion. "
                "Promote a version first"
            )
        self.resolve(f"models:/{self.model_name}/{current.tags[PREVIOUS_TAG]}", verify=True)
        return current

    def resolve(self, uri: str, *, verify: bool = False) -> RegisteredModel:
        """Return the version at ``models:/NAME@alias`` or ``models:/NAME/3``, after a check that its folder exists.

        With ``verify`` its files are compared with the digests in its manifest (once per process while they do not
        change); use it before loading them. Raises ``UserError`` for an address that does not exist, ``StorageError``
        if the weights are gone, ``DamagedError`` if they differ from what was registered.
        """
        match = MODEL_URI.fullmatch(uri)
        if match is None:
            raise UserError(f"model address {uri!r}: expected models:/NAME@alias or models:/NAME/3")
        name = match["name"]
        found = self._by_alias(name, match["alias"]) if match["alias"] else self._by_number(name, match["version"])
        if found is None:
            raise UserError(f"model address {uri!r}: no such version in {self.tracking_uri}; {self._what_exists(name)}")
        fetch_missing(found.folder)
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
        """Return all versions of the project's model, oldest first."""
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
        """Raise RegistryLostError if the SQLite file is gone, before a new database would be created."""
        file = database_file(self.tracking_uri)
        if file is not None and not file.exists():
            raise lost(f"{file} does not exist", noted, self.model_name, file)

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
            file = database_file(self.tracking_uri)
            raise lost(f"MLflow {redact(self.tracking_uri)} {has}", noted, self.model_name, file)

    def _make_project(self, client: "MlflowClient") -> str:
        """Return the experiment's id; create the experiment and the registered model if they are missing."""
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
            return str(client.create_experiment(self.project, artifact_location=location, tags=_EXPERIMENT_TAGS))
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
        if is_server(self.tracking_uri) and run_id is not None:
            path = _artifact_path(folder)
            every[UPLOADED_TAG] = upload_model(client, run_id, folder, path, self._upload_max_bytes)
        created = client.create_model_version(
            self.model_name,
            source=self._source(folder, run_id),
            run_id=run_id,
            tags={name: str(value) for name, value in every.items() if value is not None},
            await_creation_for=0,
        )
        self._describe(created)
        return int(created.version)

    def _describe(self, known: "ModelVersion") -> None:
        """Write what the tags of a version say into its description, which MLflow's pages show."""
        text = describe_version(self.model_name, int(known.version), known.tags)
        if text != known.description:
            self._open()[0].update_model_version(self.model_name, str(known.version), text)

    def _source(self, folder: Path, run_id: str | None) -> str:
        """MLflow's source of a version: ``folder``; on a server, which rejects folders of this machine, the run."""
        if is_server(self.tracking_uri) and run_id is not None:
            return f"runs:/{run_id}/{_artifact_path(folder)}"
        return str(folder)

    def _all_versions(self, name: str) -> list[RegisteredModel]:
        """Versions, oldest first. A search does not return aliases, so they are queried separately."""
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
        client, _ = self._open()  # before any other import of MLflow, because ``_open`` imports it under a lock
        from mlflow.exceptions import MlflowException

        try:
            version = ask(client)
            return _registered(version, version.aliases)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def _what_exists(self, name: str) -> str:
        known = self._all_versions(name)
        if not known:
            models = sorted(model.name for model in self._open()[0].search_registered_models(max_results=1000))
            near = difflib.get_close_matches(name, models, n=1)
            meant = f"; did you mean {near[0]}?" if near and near[0] != name else ""
            return f"{name} has no versions{meant}"
        aliases = sorted(alias for found in known for alias in found.aliases)
        return f"{name} has versions {known[0].version}..{known[-1].version} and aliases {', '.join(aliases) or 'none'}"


def lost(what: str, noted: NotedVersion, model_name: str, file: Path | None) -> RegistryLostError:
    """Build the error for a registry that lacks a version named by a note; ``what`` describes the problem."""
    copied = "" if file is None else f" (a copy is {backup_of(file)})"
    return RegistryLostError(
        f"{what}, but {noted.note} names version {noted.version} of model {model_name}: restore MLflow's database"
        f"{copied}, or correct its address"
    )


def describe_version(name: str, version: int, tags: Mapping[str, str]) -> str:
    """What a version is, how good it is, and how to load it, from its tags; Markdown."""
    lines = [f"Policy after round {tags['round']}." if "round" in tags else "Policy."]
    if "base_model" in tags:
        method = f"Trained with `{tags['algorithm']}`, from" if "algorithm" in tags else "Trained from"
        lines.append(f"{method} the base model `{tags['base_model']}`.")
    passes = [(what, float(tags[tag])) for tag, what in _HELD_OUT.items() if tag in tags]
    if passes:
        lines.append("Held-out tasks: " + ", ".join(f"{value:.1%} {what}" for what, value in passes) + ".")
    if tags.get(UPLOADED_TAG) != "False":
        lines.append(f'Load it with `mlflow.transformers.load_model("models:/{name}/{version}")`.')
    else:
        lines.append(f"Load it from the folder in the tag `{CHECKPOINT_TAG}`.")
    return "\n\n".join(lines)


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


def _artifact_path(folder: Path) -> str:
    """Path of a checkpoint among the artifacts of its run."""
    return f"checkpoints/{folder.name}"


def version_tags(lineage: Mapping[str, Any], weights_digest: str) -> dict[str, Any]:
    """A model version's tags: the plain values of its training's lineage."""
    return {
        **{name: value for name, value in lineage.items() if not isinstance(value, dict)},
        DIGEST_TAG: weights_digest,
    }
