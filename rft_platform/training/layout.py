"""How models lie on the ranks' devices and are computed there; what a trainer group is started with."""

from dataclasses import dataclass
from typing import Literal

from rft_platform.errors import UserError


@dataclass(frozen=True, slots=True)
class Layout:
    """Settings that change what a step costs, and only within rounding what it computes."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # of gradients while they are summed over ranks
    cpu_offload: bool = False  # parameters, gradients and AdamW's moments rest in host memory; needs CUDA
    gradient_checkpointing: bool = False  # a layer's activations are computed again in the backward pass
    compile: bool | None = None  # torch.compile of each layer, for packs of few lengths; None: where it pays

    def compiles(self, device_type: str, *, float32: bool) -> bool:
        """Whether layers are compiled on this device: by default on CUDA, but not in float32."""
        return (device_type == "cuda" and not float32) if self.compile is None else self.compile

    def check(self, device_type: str) -> None:
        """UserError for what this device cannot do."""
        if self.cpu_offload and device_type != "cuda":
            raise UserError("trainer.cpu_offload moves parameters from a GPU to the host: without a GPU turn it off")
