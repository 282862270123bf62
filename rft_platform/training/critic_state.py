"""The critic's part of a checkpoint: a model folder and the optimizer moments, below ``trainer_state/critic``."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from rft_platform.files import read_json, write_json
from rft_platform.training.critic import Critic, load_critic
from rft_platform.training.manifest import verified_weights
from rft_platform.training.optimizer import build_optimizer
from rft_platform.training.protocol import CriticSpec
from rft_platform.training.ranks import Ranks
from rft_platform.training.state import restore_moments

CRITIC, MOMENTS = "critic", "moments"  # name of the folder, and of its sharded files
_UPDATES = "updates.json"


@dataclass(frozen=True, slots=True)
class CriticTensors:
    """A critic's weights as published: full float32 tensors on the CPU."""

    weights: dict[str, Tensor]
    updates: int

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.weights.values())

    def copied(self) -> "CriticTensors":
        """Return a copy with its own memory, so that training can continue."""
        return replace(self, weights={name: tensor.clone() for name, tensor in self.weights.items()})


def gather_critic(critic: Critic) -> CriticTensors:
    """Gather the tensors of ``critic`` for rank 0. Every rank must call it."""
    model = critic.model.model
    whole: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    weights = {name: tensor.contiguous() for name, tensor in whole.items()}
    return CriticTensors(weights, critic.updates)


def write_critic(folder: Path, critic: Critic, tensors: CriticTensors) -> None:
    """Write the tensors of ``gather_critic`` into ``folder``, a checkpoint's ``trainer_state``, without the moments."""
    target = folder / CRITIC
    critic.model.model.save_pretrained(target, state_dict=tensors.weights, max_shard_size="100TB")
    write_json(target / _UPDATES, {"updates": tensors.updates})


def read_critic(folder: Path, body: Path, spec: CriticSpec, ranks: Ranks, dtype: torch.dtype, *, fresh: bool) -> Critic:
    """Read the critic of a checkpoint's ``trainer_state`` (``folder``), onto any number of ranks.

    If there is none, a new one starts from ``spec.folder``, else from the model in ``body``. ``fresh`` resets the
    moments and the update count, but keeps the weights.
    """
    saved = folder / CRITIC
    found = saved.is_dir()
    source = saved if found else Path(spec.folder).absolute() if spec.folder else body
    if source not in (saved, body):  # those two were verified with the checkpoint
        ranks.from_first(lambda: verified_weights(source))
    model = load_critic(source, ranks, dtype)
    optimizer = build_optimizer(model.model, spec.optimizer)
    updates = 0
    if found and not fresh:
        restore_moments(model.model, optimizer, saved)
        updates = read_json(saved / _UPDATES)["updates"]
    return Critic(model, optimizer, updates, spec.folder)
