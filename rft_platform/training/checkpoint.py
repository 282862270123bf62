"""Checkpoints: a Hugging Face folder that any library loads, with the trainer's own state and a manifest beside it.

Layout of ``global_step_<n>``::

    model.safetensors, config.json             or adapter_model.safetensors, adapter_config.json
    generation_config.json, tokenizer files, chat template
    trainer_state/optimizer.safetensors        AdamW's moments
    trainer_state/random.safetensors           states of the random generators
    trainer_state/master.safetensors           float32 weights, where the published ones are rounded
    trainer_state/state.json                   position in the demonstrations
    steps.json                                 metrics of each step
    manifest.json                              origin, and the digest of every file
"""

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rft_platform.errors import UserError
from rft_platform.files import atomic_path, read_json, write_json
from rft_platform.training.manifest import (
    STEPS,
    TRAINER_STATE,
    Manifest,
    describe_files,
    read_manifest,
    verify,
    write_manifest,
)
from rft_platform.training.model import MASTER, load_policy
from rft_platform.training.optimizer import build_optimizer
from rft_platform.training.protocol import LoraSpec, OptimizerSpec
from rft_platform.training.ranks import Ranks
from rft_platform.training.state import (
    TrainerState,
    gather_moments,
    gather_weights,
    random_state,
    restore_moments,
    restore_random_state,
)
from rft_platform.weights import digest_weights

OPTIMIZER, RANDOM, STATE = "optimizer.safetensors", "random.safetensors", "state.json"
#: Files that go from a model's folder to those of its descendants.
_COMPANIONS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.jinja", "*.tiktoken",
)  # fmt: skip
_ONE_FILE = "100TB"


@dataclass(frozen=True, slots=True)
class Position:
    """How far demonstrations have been used: ``rows`` taken from the endless shuffled stream of one file and seed."""

    data_digest: str
    seed: int
    rows: int


def load_state(
    folder: Path,
    ranks: Ranks,
    dtype: torch.dtype,
    spec: OptimizerSpec,
    *,
    lora: LoraSpec | None,
    version: int,
    seed: int,
    fresh: bool,
) -> TrainerState:
    """The state in ``folder``: a checkpoint of ours, whose digests are verified, or any Hugging Face model.

    ``version`` is the number of optimiser steps the caller counts behind it. ``fresh`` leaves the optimizer's moments
    behind. Raises UserError where ``lora`` does not fit the checkpoint.
    """
    origin = ranks.from_first(lambda: _inspect(folder))
    saved, base_model = _saved_lora(origin), origin["base_model"]
    if saved is not None and lora != saved:
        raise UserError(f"{folder} holds a LoRA adapter of {saved}, but {lora} was asked for: use the same settings")
    weights = Path(base_model) if base_model else folder
    policy = load_policy(
        weights, ranks, dtype, lora=None if saved else lora, adapter=folder if saved else None, seed=seed
    )
    optimizer = build_optimizer(policy.model, spec)
    torch.manual_seed(seed)
    resumed = origin["trained"] and saved == lora and not fresh
    if resumed:
        restore_moments(policy, optimizer, folder / TRAINER_STATE / OPTIMIZER)
        restore_random_state(load_file(folder / TRAINER_STATE / RANDOM))
    return TrainerState(
        policy=policy,
        optimizer=optimizer,
        folder=folder,
        digest=origin["digest"] if resumed else "",
        weights_digest=origin["weights_digest"],
        policy_version=version,
        base_model=weights if lora else None,
        lora=lora,
    )


def _inspect(folder: Path) -> dict[str, Any]:
    """What there is in ``folder``, as JSON: read and verified by one rank for all."""
    if not any(folder.glob("tokenizer*")):
        raise UserError(
            f"model folder {folder} holds no tokenizer (tokenizer.json): no engine could serve what it becomes"
        )
    manifest = read_manifest(folder)
    if manifest is None:
        digest = digest_weights(folder)
        return {"digest": digest, "weights_digest": digest, "trained": False, "lora": None, "base_model": None}
    verify(folder, manifest)
    return {
        "digest": manifest.state_digest,
        "weights_digest": manifest.weights_digest,
        "trained": True,
        "lora": manifest.lora,
        "base_model": manifest.base_model,
    }


def _saved_lora(origin: dict[str, Any]) -> LoraSpec | None:
    saved = origin["lora"]
    if saved is None:
        return None
    modules = saved["target_modules"]
    return LoraSpec(saved["rank"], saved["alpha"], modules if isinstance(modules, str) else tuple(modules))


def read_position(folder: Path) -> Position | None:
    """How far the training that made ``folder`` had come in its demonstrations, if it used any."""
    file = folder / TRAINER_STATE / STATE
    saved = read_json(file)["position"] if file.exists() else None
    return None if saved is None else Position(**saved)


def publish(
    folder: Path,
    state: TrainerState,
    manifest: Manifest,
    position: Position | None,
    steps: list[dict[str, Any]],
    ranks: Ranks,
) -> Manifest:
    """Write the checkpoint of ``state`` to ``folder``, whole or not at all; returns the finished manifest.

    ``manifest`` comes with its digests empty. Every rank must call it; rank 0 writes.
    """
    weights, moments = gather_weights(state), gather_moments(state)

    def write() -> dict[str, Any]:
        _remove_leftovers(folder)
        with atomic_path(folder, needs=_bytes_of(state, weights, moments)) as temp:
            temp.mkdir()
            _write_weights(temp, state, weights)
            _copy_companions(state.folder, temp)
            _write_trainer_state(temp / TRAINER_STATE, state, weights, moments)
            write_json(temp / TRAINER_STATE / STATE, {"position": None if position is None else asdict(position)})
            write_json(temp / STEPS, steps)
            done = replace(manifest, weights_digest=digest_weights(temp), files=describe_files(temp))
            write_manifest(temp, done)
        return {"files": done.files, "weights_digest": done.weights_digest}

    return replace(manifest, **ranks.from_first(write))


def _remove_leftovers(folder: Path) -> None:
    """What a trainer that was killed while it wrote this checkpoint left: nobody reads it, and it takes room."""
    for left in [*folder.parent.glob(f".{folder.name}.*.tmp"), *folder.parent.glob(f".{folder.name}.*.old")]:
        shutil.rmtree(left)


def _bytes_of(state: TrainerState, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> int:
    """Least size of the checkpoint in bytes: published weights, moments, float32 weights where those are rounded."""
    published = sum(value.numel() * state.dtype.itemsize for value in weights.values())
    masters = sum(value.nbytes for value in weights.values()) if state.dtype != torch.float32 else 0
    return published + masters + sum(value.nbytes for value in moments.values())


def _write_weights(folder: Path, state: TrainerState, weights: dict[str, Tensor]) -> None:
    if state.lora is not None:
        _write_adapter(folder, state, weights)
        return
    rounded = {name: value.to(state.dtype) for name, value in weights.items()}
    state.policy.causal.save_pretrained(folder, state_dict=rounded, max_shard_size=_ONE_FILE)
    if state.dtype != torch.float32:  # transformers writes the format of the float32 model in memory
        config = read_json(folder / "config.json")
        write_json(folder / "config.json", config | {"dtype": str(state.dtype).removeprefix("torch.")})


def _write_adapter(folder: Path, state: TrainerState, weights: dict[str, Tensor]) -> None:
    from peft import get_peft_model_state_dict

    model: Any = state.policy.model
    adapter = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    save_file(adapter, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(folder)


def _copy_companions(source: Path, target: Path) -> None:
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def _write_trainer_state(
    folder: Path, state: TrainerState, weights: dict[str, Tensor], moments: dict[str, Tensor]
) -> None:

    folder.mkdir()
    save_file(moments, folder / OPTIMIZER)
    save_file(random_state(), folder / RANDOM)
    if state.dtype != torch.float32:
        save_file(weights, folder / MASTER)
