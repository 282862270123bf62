"""The policy that a user means by the number of a round."""

from rft_platform.errors import UserError
from rft_platform.experience.rounds import round_key
from rft_platform.rounds.policy import Policy, published
from rft_platform.rounds.project import Project


def round_policy(project: Project, number: int | None = None) -> Policy:
    """The policy that round ``number`` ended with, by default the newest; UserError where there is none."""
    found = {n: policy for n in project.store.rounds() if (policy := published(project.store, n)) is not None}
    if not found:
        raise UserError(f"{project.home.root}: no round has published a policy yet; train first")
    wanted = max(found) if number is None else number
    if wanted not in found:
        known = f"{round_key(min(found))} to {round_key(max(found))}"
        raise UserError(f"{round_key(wanted)} has published no policy; {known} have")
    return found[wanted]
