"""Section ``policies``: trainable policies beside the first one, each of which learns from its own calls."""

from pydantic import Field

from rft_platform.config.section import Section


class FurtherPolicy(Section):
    """A policy beside the one of section ``model``.

    It is served by an engine of its own, as sections ``engine`` and ``explorer.rollout_model`` say, and trained as
    sections ``algorithm``, ``buffer`` and ``trainer`` say, all of which it shares with the first.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)
    """By which calls name it as their ``model``; its checkpoints lie in a folder of this name."""
    model_path: str = Field(min_length=1)
    """A folder, a Hugging Face name, or ``models:/NAME@alias`` of the registry: what it starts from."""
    train: bool = True
    """false: it is served and its calls are recorded, but it stays as it is."""

    @property
    def lease(self) -> str:
        """Stem of the lease and log files of its engine."""
        return f"policy-{self.name}"
