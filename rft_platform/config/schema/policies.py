"""Section ``policies``: additional trainable policies, each trained on its own calls."""

from pydantic import Field

from rft_platform.config.schema.section import Section


class FurtherPolicy(Section):
    """A policy in addition to the one of section ``model``.

    It has its own engine, configured by sections ``engine`` and ``explorer.rollout_model``, and is trained with the
    settings of sections ``algorithm``, ``buffer`` and ``trainer``. It shares all these sections with the first policy.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)
    """Name that calls use as their ``model``; also the name of the folder with its checkpoints."""
    model_path: str = Field(min_length=1)
    """Starting weights: a folder, a Hugging Face name, or ``models:/NAME@alias`` of the registry."""
    train: bool = True
    """false: the policy is served and its calls are recorded, but it is not trained."""

    @property
    def lease(self) -> str:
        """Stem of the lease and log file names of its engine."""
        return f"policy-{self.name}"
