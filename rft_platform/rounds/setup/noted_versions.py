"""The model versions named in the policy notes of a project: their registry, run names and tags."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.common.sqlite_files import database_file
from rft_platform.config.home import Home
from rft_platform.experience.store import ExperienceStore
from rft_platform.model_registry.models import NotedVersion, lost
from rft_platform.model_registry.sqlite_reader import read_versions
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, published, read


@dataclass(frozen=True, slots=True)
class RegisteredPolicy:
    """A registered policy. Rounds without an optimiser step share the policy and version of the round before."""

    policy: Policy
    version: int
    rounds: tuple[int, ...]  # ascending; the first round trained the policy


def registered_policies(store: ExperienceStore, name: str = DEFAULT_POLICY) -> list[RegisteredPolicy]:
    """The registered versions of a policy that the notes name, in training order."""
    rounds: dict[str, list[int]] = {}
    found: dict[str, Policy] = {}
    for number in store.rounds():
        policy = published(store, number, name)
        if policy is not None and policy.model_version is not None:
            rounds.setdefault(policy.folder, []).append(number)
            found.setdefault(policy.folder, policy)
    return [
        RegisteredPolicy(policy, int(policy.model_version or 0), tuple(rounds[folder]))
        for folder, policy in found.items()
    ]


def configured_uri(project: Project) -> str | None:
    """MLflow's address from ``MLFLOW_TRACKING_URI`` or the configuration; None means SQLite in the project's home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or project.config.registry.tracking_uri or None


def local_uri(home: Home) -> str:
    """The address of the project's own SQLite registry."""
    return f"sqlite:///{home.mlflow / 'mlflow.db'}"


def newest_noted(store: ExperienceStore, name: str = DEFAULT_POLICY) -> NotedVersion | None:
    """The version of the newest registered policy; None if nothing is registered yet. Reads only the newest notes."""
    return next(_noted(store, name), None)


def _noted(store: ExperienceStore, name: str) -> Iterator[NotedVersion]:
    for number in reversed(store.rounds()):
        policy = published(store, number, name)
        if policy is not None and policy.model_version is not None:
            note = read(store, number).file(Policy, name)
            yield NotedVersion(int(policy.model_version), policy.weights_digest, note)


def check_registry(project: Project) -> None:
    """Raise RegistryLostError if an SQLite registry lacks the newest noted version, before anything starts.

    Reads the database file directly, because importing MLflow takes seconds. A server is checked at connection time.
    """
    noted, uri = newest_noted(project.store), configured_uri(project) or local_uri(project.home)
    file = database_file(uri)
    if noted is None or file is None:
        return
    if not file.exists():
        raise lost(f"{file} does not exist", noted, project.model_name)
    versions = read_versions(uri, project.model_name)
    if versions is not None and all(version.version != noted.version for version in versions):
        raise lost(f"{file} does not know this version", noted, project.model_name)
