"""Versions that were withdrawn from production: by a canary, an A/B test or a roll-back."""

from rft_platform.rounds.project.policy import parent_round, published
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.selection.production_rows import traffic_database
from rft_platform.serving.release_store import ReleaseStore


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
        return {}  # without reading the notes of all rounds
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
