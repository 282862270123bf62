"""Names of the notes in a round's folder. A stage writes its note when it is complete, never before.

A note about one policy is called ``stored_name(note, policy)``.
"""

SNAPSHOT = "snapshot"  # the policy that explores
EXPLORE = "explore"
JUDGE = "judge"
TRAIN = "train"
POLICY = "policy"  # the policy that the round published; round 0 holds the starting policy
EVALUATION = "evaluation"
WARM_START = "warm_start"  # of round 0
DEMONSTRATIONS = "demonstrations"  # corrections of production traffic that an online round collected
DATASET = "dataset"  # of an offline training
