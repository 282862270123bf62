"""What a trainer holds between two requests: a policy, its optimizer, and where it came from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from rft_platform.training.logprobs import PackedPolicy
from rft_platform.training.protocol import LoraSpec

#: Whole tensors, not shards: what is saved by N ranks can be loaded by M.
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTER = StateDictOptions(full_state_dict=True)


@dataclass(slots=True)
class TrainerState:
    """A policy and its optimizer. ``folder`` is where they were loaded from or published to."""

    policy: PackedPolicy
    optimizer: torch.optim.AdamW
    folder: Path
    digest: str  # identity of the state in ``folder`` (``manifest.identify``); empty where this one is not exactly that
    weights_digest: str
    policy_version: int
    base_model: Path | None = None  # folder of the full weights where an adapter is trained
    lora: LoraSpec | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Format of the published full weights; adapters stay in float32."""
        return self.policy.compute_dtype if self.lora is None else torch.float32


def gather_weights(state: TrainerState) -> dict[str, Tensor]:
    """Trainable float32 tensors by name, whole, on the CPU, shared ones once. For rank 0, but all must call it."""
    model = state.policy.model
    whole = get_model_state_dict(model, options=_GATHER)
    if state.lora is None:
        kept = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    else:
        kept = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: whole[name].contiguous() for name in kept if name in whole}


def gather_moments(state: TrainerState) -> dict[str, Tensor]:
    """AdamW's moments and steps as ``<parameter>.<exp_avg, exp_avg_sq or step>``. For rank 0, but all must call it."""
    whole: Any = get_optimizer_state_dict(state.policy.model, state.optimizer, options=_GATHER)
    moments = whole.get("state", {}).items()
    return {f"{parameter}.{key}": value for parameter, values in moments for key, value in values.items()}


def restore_moments(policy: PackedPolicy, optimizer: torch.optim.AdamW, file: Path) -> None:
    """Load what ``gather_moments`` gave from a safetensors file, onto any number of ranks."""
    from safetensors.torch import load_file

    names = {parameter: name for name, parameter in policy.model.named_parameters()}
    moments: dict[str, Any] = {}
    for name, value in load_file(file).items():
        parameter, _, key = name.rpartition(".")
        moments.setdefault(parameter, {})[key] = value
    groups = [group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    whole: dict[str, Any] = {"state": moments, "param_groups": groups}
    set_optimizer_state_dict(policy.model, optimizer, whole, options=_SCATTER)


def random_state() -> dict[str, Tensor]:
    """State of torch's generators on this rank, as tensors."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: dict[str, Tensor]) -> None:
    """Set torch's generators as ``random_state`` found them."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
