"""How models are placed and computed on the ranks' devices: launch options of the trainer group."""

from dataclasses import dataclass
from typing import Literal

from rft_platform.errors import UserError


@dataclass(frozen=True, slots=True)
class Layout:
    """Settings that change the cost of a step. They change its result by rounding only."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of gradient sums over ranks
    cpu_offload: bool = False  # keep parameters, gradients and moments in host memory; needs CUDA
    gradient_checkpointing: bool = False  # recompute a layer's activations in the backward pass
    compile: bool | None = None  # torch.compile each layer, for packs of few lengths; None: see ``compiles``

    def compiles(self, device_type: str, *, float32: bool) -> bool:
        """Whether layers are compiled on this device. Default: on CUDA, except in float32."""
        return (device_type == "cuda" and not float32) if self.compile is None else self.compile

    def check(self, device_type: str) -> None:
        """Raise UserError for options that this device does not support."""
        if self.cpu_offload and device_type != "cuda":
            raise UserError("trainer.cpu_offload moves parameters from a GPU to the host: without a GPU turn it off")
