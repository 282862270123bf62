"""Names of the notes in a round's folder. A stage writes its note when it is complete, never before."""

from rft_platform.experience.selections import selection_name

SNAPSHOT = "snapshot"  # the policy that explores
EXPLORE = "explore"
JUDGE = "judge"
ROW_SELECTION = selection_name()  # the rows of a training that selects them one by one
TRAIN = "train"
POLICY = "policy"  # the policy that the round published; round 0 holds the starting policy
EVALUATION = "evaluation"
WARM_START = "warm_start"  # of round 0
DEMONSTRATIONS = "demonstrations"  # corrections of production traffic that an online round collected
DATASET = "dataset"  # of an offline training


def note_of(note: str, name: str | None) -> str:
    """The name of a note about a policy; the notes of further policies end in the policy's name."""
    return note if name is None else f"{note}-{name}"
