"""How a model is tuned."""

from pydantic import Field

from rft_platform.tuner.section import TunerSection


class AlgorithmConfig(TunerSection):
    """The algorithm and its pace. One step explores ``batch_size`` tasks and makes one optimiser step."""

    algorithm_type: str = Field(default="multi_step_grpo", min_length=1)
    """One of those in docs/algorithms.md that learn from rewards."""
    learning_rate: float = Field(default=1e-6, gt=0)
    group_size: int = Field(default=8, ge=1)
    """Runs of a task; they are compared with each other."""
    batch_size: int = Field(default=32, ge=1)
    """Tasks a step."""
    save_interval_steps: int = Field(default=100, ge=1)
    """Checkpoints at multiples of so many steps keep their weights, like the newest ones and the best."""
    eval_interval_steps: int = Field(default=100, ge=1)
    """Steps between evaluations; the start and the end are evaluated too."""
