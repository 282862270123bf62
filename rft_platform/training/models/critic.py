"""The critic: a value model over the same packs as the policy. It predicts the future reward of every state.

It is a causal transformer with one float32 output instead of the LM head: ``V_t = w . h_t + b``, where h_t is the
hidden state that predicts token t. States that rows share are computed once. On disk the critic is a token classifier
of transformers with one label: any other program can load it, and a critic can start from any such model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rft_platform.algorithms.spec import CriticSpec
from rft_platform.common.errors import UserError
from rft_platform.training.distributed import Ranks
from rft_platform.training.models.loading import is_sharded, own_memory, prepare_policy, shard
from rft_platform.training.models.optimizer import build_optimizer
from rft_platform.training.packed.attention import ATTENTION, register_attention
from rft_platform.training.packed.lm_head import PackTensors
from rft_platform.training.packed.model_support import check_packable
from rft_platform.training.packed.packed_policy import packed_hidden
from rft_platform.training.packed.packing import StaticLengths


class PackedCritic(nn.Module):
    """A transformers token classifier with one label, called with packs. An FSDP2 root like ``PackedPolicy``."""

    def __init__(self, model: Any, *, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.runs_on: torch.device | None = None
        self.static: StaticLengths | None = None  # as in ``PackedPolicy``
        self.reduces_once = False
        self.compute_dtype = compute_dtype or next(model.parameters()).dtype
        check_packable(model)
        register_attention()
        model.set_attn_implementation(ATTENTION)

    @property
    def device(self) -> torch.device:
        """The device of the computation; offloaded parameters are stored elsewhere."""
        return self.runs_on or next(self.model.parameters()).device

    @property
    def body(self) -> Any:
        """The transformer below the value head."""
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.body.layers

    def forward(self, batch: PackTensors) -> Tensor:
        """Return the value of the state before each of the pack's tokens, float32 [N], in the pack's order."""
        hidden = packed_hidden(self.body, batch)
        value: Tensor = self.model.score(hidden.float()).squeeze(-1)
        return value.index_select(0, batch.token_head)


def load_critic(folder: Path, ranks: Ranks, dtype: torch.dtype) -> PackedCritic:
    """Load the critic that starts from ``folder`` on every rank: float32 master weights, activations of ``dtype``.

    If ``folder`` holds a causal LM, the critic takes its body, and the value head starts at 0, so all states have the
    same value before the first update. A token classifier with one label (a saved critic) is loaded completely. Raises
    UserError for any other model.
    """
    from transformers import AutoModelForTokenClassification

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: expected a Hugging Face model folder for the critic, but it has no config.json")
    try:
        model, info = AutoModelForTokenClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder}: transformers cannot make a value model of it: {error}") from error
    _start_head(model, set(info["missing_keys"]), folder)
    model.to(ranks.device)
    own_memory(model)
    model.eval()  # no dropout: a value must not depend on random numbers
    critic = PackedCritic(model, compute_dtype=dtype)
    critic.runs_on = ranks.device
    prepare_policy(critic, model, ranks, dtype)
    if is_sharded(ranks, dtype):
        critic.reduces_once = ranks.layout.reduce_once
        keep = critic.reduces_once or ranks.world_size == 1
        shard(critic, critic.layers, ranks, dtype, in_float32=[model.score], keep_gathered=keep)
    return critic


def _start_head(model: Any, missing: set[str], folder: Path) -> None:
    """Set a value head that the files lack to 0. Raises UserError if the files lack any other weight."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UserError(
            f"{folder}: a {type(model).__name__} has no linear value head called 'score', so this model cannot be "
            "a critic; set model.critic_model_path to another model"
        )
    random = sorted(name for name in missing if not name.startswith("score."))
    if random:
        raise UserError(f"{folder}: the critic's body would be random, because {', '.join(random[:3])} are missing")
    if missing:
        for parameter in head.parameters():
            nn.init.zeros_(parameter)


@dataclass(slots=True)
class Critic:
    """The critic state that a trainer holds."""

    model: PackedCritic
    optimizer: torch.optim.AdamW
    updates: int  # number of the critic's optimiser steps, on which its warm-up and learning rate depend
    origin: str | None  # ``CriticSpec.folder`` of the request that created the critic

    def take_settings(self, spec: CriticSpec) -> None:
        """Apply the optimizer settings of ``spec`` and keep the moments."""
        self.optimizer = build_optimizer(self.model.model, spec.optimizer, self.optimizer)
