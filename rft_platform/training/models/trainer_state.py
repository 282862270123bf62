"""Trainer state held between two requests: a policy, its optimizer, and their origin."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft_platform.algorithms.kl import KlControl
from rft_platform.algorithms.spec import CriticSpec, LoraSpec, OptimizerSpec
from rft_platform.training.models.critic import Critic
from rft_platform.training.models.loading import master_weights
from rft_platform.training.models.optimizer import build_optimizer
from rft_platform.training.models.shards import local_part, on_host
from rft_platform.training.packed.packed_policy import PackedPolicy


@dataclass(slots=True)
class TrainerState:
    """A policy and its optimizer. They were loaded from ``folder`` or published to it."""

    policy: PackedPolicy
    optimizer: torch.optim.AdamW
    folder: Path
    digest: str  # identity of the state in ``folder`` (``manifest.identify``); empty if this state was modified since
    weights_digest: str
    policy_version: int
    base_model: Path | None = None  # folder of the full weights if an adapter is trained
    base_digest: str | None = None  # digest of the full weights
    lora: LoraSpec | None = None
    critic: Critic | None = None
    kl_control: KlControl | None = None  # current state of an adaptive KL penalty

    def serves(self, lora: LoraSpec | None, critic: CriticSpec | None) -> bool:
        """Whether a training with this adapter and critic can continue from this state without reading from disk."""
        fits = critic is None if self.critic is None else critic is not None and critic.folder == self.critic.origin
        return self.lora == lora and fits

    def continue_with(self, optimizer: OptimizerSpec, critic: CriticSpec | None, folder: Path) -> None:
        """Apply the settings of the next training; moments, weights and counts are kept."""
        self.folder = folder  # must not be removed: a checkpoint copies tokenizer and templates from here
        self.optimizer = build_optimizer(self.policy.model, optimizer, self.optimizer)
        if self.critic is not None and critic is not None:
            self.critic.take_settings(critic)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the published weights; adapters stay in float32."""
        return self.policy.compute_dtype if self.lora is None else torch.float32


def gather_weights(state: TrainerState) -> dict[str, Tensor]:
    """Gather the full trainable tensors in host memory, by name, in the published dtype. All ranks must call it.

    A shared tensor is returned once. Each rank rounds its part before it is gathered; only rank 0 gets the tensors.
    """
    return on_host(_published(state))


def _published(state: TrainerState) -> Iterator[tuple[str, Tensor]]:
    """The full tensors one at a time, so that a GPU holds one of them; nothing on ranks other than 0."""
    model = state.policy.model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, tensor in master_weights(model).items():
        if state.lora is not None and name not in trained:
            continue
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1:
            mesh = tensor.device_mesh
            whole = tensor.to(device=mesh.device_type, dtype=state.dtype).full_tensor()
            if mesh.get_rank() == 0:
                yield name, whole.contiguous()
        elif not dist.is_initialized() or dist.get_rank() == 0:
            yield name, local_part(tensor).to(state.dtype).contiguous()


def random_state() -> dict[str, Tensor]:
    """Return the state of torch's generators on this rank, as tensors."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: dict[str, Tensor]) -> None:
    """Restore torch's generators from the result of ``random_state``."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
