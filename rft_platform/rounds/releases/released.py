"""The versions of a project that are released, serve, or were withdrawn from production."""

from collections.abc import Iterator

from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, parent_round, published, read


def is_released(project: Project, policy: Policy) -> bool:
    """Whether a policy may serve without a user's decision.

    With held-out tasks, the evaluation must have promoted the policy; without them, its round must have ended. The
    starting policy may always serve. A host that only serves follows the decision of the host that trains.
    """
    evaluated = read(project.store, policy.round).evaluated
    if evaluated is not None and evaluated.released is not None:
        return evaluated.released
    gated = bool(project.config.buffer.explorer_input.eval_tasksets)
    return policy.round == 0 or (evaluated is not None and (not gated or evaluated.promoted))


def released_policy(project: Project) -> Policy | None:
    """The newest released policy; None before the first one, when the engine serves the base model."""
    return next((policy for policy in newest_first(project) if is_released(project, policy)), None)


def serving_policy(project: Project) -> Policy | None:
    """The project's own policy that serves: in an online project by a decision, else the newest released one.

    None before the first one. While an imported version serves, it is the newest released policy.
    """
    served = None if project.traffic is None else project.traffic.served_version()
    return (None if served is None else own_policy(project, served)) or released_policy(project)


def own_policy(project: Project, version: int) -> Policy | None:
    """The policy with this policy version that a round has published."""
    return next((policy for policy in newest_first(project) if policy.policy_version == version), None)


def withdrawn_versions(project: Project) -> dict[int, str]:
    """What withdrew each withdrawn policy version of an online project, as a clause: "canary 3 withdrew version 16".

    A version that was trained from a withdrawn one counts as withdrawn too, unless a decision chose it to serve. Such
    versions exist because a canary takes time: rounds train on while it runs.
    """
    verdicts = {} if project.traffic is None else project.traffic.verdicts()
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


def newest_first(project: Project) -> Iterator[Policy]:
    """The published policies of all rounds, newest first."""
    for number in reversed(project.store.rounds() or [0]):
        policy = published(project.store, number)
        if policy is not None:
            yield policy
