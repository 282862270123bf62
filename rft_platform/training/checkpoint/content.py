"""Snapshot of the trainer state to be saved, and the code that writes the snapshot to disk.

Each rank writes its shards; rank 0 also writes everything else.
"""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from rft_platform.common.digests import digest_weights
from rft_platform.common.files import digest_json, read_json, write_json
from rft_platform.training.checkpoint.manifest import companions
from rft_platform.training.checkpoint.reading import CRITIC, MOMENTS, RANDOM, STATE, UPDATES, Position
from rft_platform.training.distributed import Ranks
from rft_platform.training.models.critic import Critic
from rft_platform.training.models.loading import master_weights
from rft_platform.training.models.optimizer import moments
from rft_platform.training.models.shards import (
    MASTER,
    OPTIMIZER,
    TRAINER_STATE,
    local_part,
    on_host,
    shard_file,
    write_shards,
)
from rft_platform.training.models.trainer_state import TrainerState, gather_weights, random_state

_WEIGHTS_FILE_BYTES = 2**27  # larger weights are split, so that digests of several files are computed in parallel
_AT_ONCE = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


@dataclass(frozen=True, slots=True)
class Draft:
    """The content of one checkpoint."""

    state: TrainerState
    shards: dict[tuple[str, str], dict[str, Tensor]]  # (folder below trainer_state, file name) -> tensors by name
    weights: dict[str, Tensor] | None  # full tensors on rank 0; None: write no Hugging Face weights
    critic: dict[str, Tensor] | None  # full float32 tensors on rank 0; None: write no critic
    critic_updates: int
    random: dict[str, Tensor]
    progress: dict[str, Any]

    @classmethod
    def take(
        cls,
        state: TrainerState,
        position: Position | None,
        ranks: Ranks,
        *,
        hf: bool,
        copy: bool,
        with_state: bool = True,
    ) -> "Draft":
        """Snapshot ``state`` for a checkpoint. With ``copy``, training may continue before it is written.

        Without ``copy``, the trainer state is only referred to: see ``copied``. Without ``with_state``, the snapshot
        has only the published weights and the small files. Without ``hf``, a model's weights are written as float32
        shards only; an adapter is small and always written. Every rank must call it.
        """
        publish = hf or state.lora is not None
        shards = _shards(state, ranks, with_master=not publish) if with_state else {}
        weights = gather_weights(state) if publish else None
        critic = _gather_critic(state.critic) if with_state and state.critic is not None else None
        updates = 0 if state.critic is None else state.critic.updates
        draft = cls(state, shards, weights, critic, updates, random_state(), _progress(state, position))
        return draft.copied(ranks) if copy else draft

    def copied(self, ranks: Ranks) -> "Draft":
        """Return the draft with its own memory on the host, so that training can continue."""
        shards, weights = self.shards, self.weights
        if ranks.world_size == 1:
            shards = {place: on_host(_local(tensors).items()) for place, tensors in shards.items()}
        if ranks.world_size > 1 or ranks.device.type == "cpu" or ranks.layout.cpu_offload:
            shards = {place: _copied(tensors) for place, tensors in shards.items()}
            weights = _cloned(weights)
        return replace(self, shards=shards, weights=weights, critic=_cloned(self.critic))

    def split(self) -> tuple["Draft", "Draft"]:
        """Split into two drafts: the weights and small files, to publish now, and the trainer state, to save later."""
        return replace(self, shards={}, critic=None), replace(self, weights=None)

    @property
    def nbytes(self) -> int:
        """Lower bound of the number of bytes that this rank writes."""
        full = [*(self.weights or {}).values(), *(self.critic or {}).values()]
        own = [local_part(value) for tensors in self.shards.values() for value in tensors.values()]
        return sum(tensor.nbytes for tensor in full + own)

    def make_folders(self, folder: Path) -> None:
        """Create ``folder`` and, in it, the folders of the shards. Rank 0 calls it before any rank writes."""
        folder.mkdir(parents=True, exist_ok=True)
        for place, _ in self.shards:
            (folder / place).mkdir(parents=True, exist_ok=True)

    def write_shards(self, folder: Path, ranks: Ranks) -> None:
        """Write this rank's shards into ``folder``, the checkpoint's ``trainer_state``."""
        for write in self._shard_writers(folder, ranks):
            write()

    def write(self, folder: Path | None, trainer_state: Path, ranks: Ranks) -> dict[Path, str]:
        """Write what rank 0 writes, large files in parallel; return the digests that are known without reading.

        If ``folder`` is None, only the shards and the critic are written.
        """
        writers = self._shard_writers(trainer_state, ranks)
        if self.critic is not None:
            writers.append(partial(self._write_critic, trainer_state / CRITIC, self.critic))
        if folder is not None:
            writers.append(partial(self._write_published, folder, trainer_state))
        with ThreadPoolExecutor(len(writers) or 1) as pool:
            written = pool.map(lambda write: write(), writers)
            return {file: digest for digests in written for file, digest in digests.items()}

    def _shard_writers(self, folder: Path, ranks: Ranks) -> list[Callable[[], dict[Path, str]]]:
        return [
            partial(write_shards, folder / place, name, tensors, ranks.rank, ranks.world_size)
            for (place, name), tensors in self.shards.items()
        ]

    def _write_published(self, folder: Path, trainer_state: Path) -> dict[Path, str]:
        """Write weights, tokenizer and template files, random state and progress."""
        self._write_weights(folder)
        for file in companions(self.state.folder):
            shutil.copyfile(file, folder / file.name)
        save_file(self.random, trainer_state / RANDOM)
        write_json(trainer_state / STATE, self.progress)
        return {}

    def _write_critic(self, target: Path, weights: dict[str, Tensor]) -> dict[Path, str]:
        """Write the critic without its moments, which are shards."""
        assert self.state.critic is not None
        self.state.critic.model.model.save_pretrained(target, state_dict=weights, max_shard_size="100TB")
        write_json(target / UPDATES, {"updates": self.critic_updates})
        return {}

    def weights_digest(self, folder: Path, files: Mapping[str, Mapping[str, Any]], ranks: Ranks) -> str:
        """Digest of the weights written to ``folder``, or of the float32 shards if no other weights were written.

        ``files`` are the digests of all files there, as in the manifest.
        """
        if self.weights is not None:
            return digest_weights(folder, lambda path: str(files[path.name]["sha256"]))
        names = [shard_file(MASTER, rank, ranks.world_size) for rank in range(ranks.world_size)]
        places = {name: f"{TRAINER_STATE}/{name}" for name in names}
        return digest_json({name: files[place]["sha256"] for name, place in places.items() if place in files})

    def _write_weights(self, folder: Path) -> None:
        if self.state.lora is not None:
            _write_adapter(folder, self.state.policy.model, self.weights or {})
            return
        causal, dtype = self.state.policy.causal, self.state.dtype
        if self.weights is None:
            causal.config.save_pretrained(folder)
        else:
            causal.save_pretrained(folder, state_dict=self.weights, max_shard_size=_WEIGHTS_FILE_BYTES)
        if dtype != torch.float32:  # transformers records the dtype of the float32 model in memory
            config = read_json(folder / "config.json")
            write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})


def _shards(state: TrainerState, ranks: Ranks, *, with_master: bool) -> dict[tuple[str, str], dict[str, Tensor]]:
    """The sharded tensors of a checkpoint: moments, and float32 weights if they are not published in float32."""
    model = state.policy.model
    shards = {("", OPTIMIZER): moments(model, state.optimizer)}
    if state.lora is None and (with_master or state.dtype != torch.float32 or ranks.world_size > 1):
        shards["", MASTER] = master_weights(model)
    if state.critic is not None:
        shards[CRITIC, MOMENTS] = moments(state.critic.model.model, state.critic.optimizer)
    return shards


def _progress(state: TrainerState, position: Position | None) -> dict[str, Any]:
    """Content of ``state.json``."""
    control = state.kl_control
    return {
        "position": None if position is None else asdict(position),
        "kl_control": None if control is None else control.to_json(),
    }


def _gather_critic(critic: Critic) -> dict[str, Tensor]:
    """Gather the tensors of ``critic`` for rank 0, float32 on the CPU. Every rank must call this function."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: dict[str, Any] = get_model_state_dict(critic.model.model, options=options)
    return {name: tensor.contiguous() for name, tensor in whole.items()}


def _cloned(tensors: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    return None if tensors is None else {name: tensor.clone() for name, tensor in tensors.items()}


def _local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: local_part(tensor) for name, tensor in tensors.items()}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the tensors to the CPU; of a sharded tensor, copy this rank's part."""
    stager = DefaultStager(_AT_ONCE)
    try:
        staged: Any = stager.stage(dict(tensors))
    finally:
        stager.close()
    return dict(staged)


def _write_adapter(folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
    from peft import get_peft_model_state_dict

    adapter = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    save_file(adapter, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy(model.peft_config["default"])
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the order of a set differs between processes
    config.save_pretrained(folder)
