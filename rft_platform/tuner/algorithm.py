"""Settings of the algorithm of ``tune()``."""

from pydantic import Field

from rft_platform.tuner.section import TunerSection


class AlgorithmConfig(TunerSection):
    """The algorithm and its intervals. One step explores ``batch_size`` tasks and makes one optimiser step."""

    algorithm_type: str = Field(default="multi_step_grpo", min_length=1)
    """An algorithm of docs/algorithms.md that learns from rewards."""
    learning_rate: float = Field(default=1e-6, gt=0)
    group_size: int = Field(default=8, ge=1)
    """Runs per task; they are compared with each other."""
    batch_size: int = Field(default=32, ge=1)
    """Tasks per step."""
    save_interval_steps: int = Field(default=100, ge=1)
    """Checkpoints at multiples of this number of steps keep their weights; so do the newest ones and the best."""
    eval_interval_steps: int = Field(default=100, ge=1)
    """Steps between evaluations; the start and the end are also evaluated."""
