"""Find the policy of the round that the user named."""

from rft_platform.common.errors import UserError
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, read, required


def round_policy(project: Project, number: int | None = None) -> Policy:
    """The policy that round ``number`` (default: the newest) ended with. Raises UserError if there is none."""
    have = [n for n in project.store.rounds() if read(project.store, n).has(Policy)]
    if not have:
        raise UserError(f"{project.home.root}: no round has published a policy yet; run a training first")
    wanted = have[-1] if number is None else number
    if wanted not in have:
        raise UserError(
            f"{round_key(wanted)} has published no policy; {round_key(have[0])} to {round_key(have[-1])} have"
        )
    return required(project.store, wanted)
