"""Names of policies, and the names of what is stored about them.

Every policy has a name. ``FIRST_POLICY`` is the name of the policy of section ``model``; the other names are in section
``policies``, whose schema excludes this one. Stored names do not contain it: the notes of the first policy are
``policy`` and ``train``, those of a policy ``rival`` are ``policy-rival`` and ``train-rival``.
"""

FIRST_POLICY = "_first"


def stored_name(stem: str, policy: str, join: str = "-") -> str:
    """The name of a note, file, figure, model or MLflow run about a policy: ``<stem><join><policy>``, or ``stem``."""
    return stem if policy == FIRST_POLICY else f"{stem}{join}{policy}"


def policy_column(policy: str) -> str | None:
    """The value of column ``policy`` in stored rows and of ``name`` in notes; null is the first policy."""
    return None if policy == FIRST_POLICY else policy


def policy_of_column(value: str | None) -> str:
    """The name of the policy that ``policy_column`` stored."""
    return FIRST_POLICY if value is None else value
