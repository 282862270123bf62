"""Names of the notes in a round's folder. A stage writes its note when it is complete, never before.

A note about one policy is called ``stored_name(note, policy)``.
"""

#: Settled before the round trains: the earlier policy that its training starts from, because the gate refused newer
#: ones. Without this note a round trains the policy of the round before.
START = "start"
SNAPSHOT = "snapshot"  # the policy that explores
EXPLORE = "explore"
JUDGE = "judge"
TRAIN = "train"
POLICY = "policy"  # the policy that the round published; round 0 holds the starting policy
EVALUATION = "evaluation"
WARM_START = "warm_start"  # of round 0
DEMONSTRATIONS = "demonstrations"  # corrections of production traffic that an online round collected
DATASET = "dataset"  # of an offline training
EXCHANGE = "exchange"  # on a host that only serves: which revision of the round's record was taken
