"""Read checkpoints: a Hugging Face folder that any library loads, plus the trainer state and a manifest.

Layout of ``global_step_<n>``::

    model.safetensors, config.json             or adapter_model.safetensors, adapter_config.json
    model-*-of-*.safetensors,                  in place of model.safetensors for weights above 134 MB (2**27 bytes)
    model.safetensors.index.json
    generation_config.json, tokenizer files, chat template
    trainer_state/optimizer*.safetensors       AdamW's moments, the shards of each rank (``shards.py``)
    trainer_state/master*.safetensors          float32 weights, in shards; written if the model is on several ranks, or
                                               the published weights are not float32 or were not written
    trainer_state/random.safetensors           states of the random generators
    trainer_state/critic/                      the value model, its AdamW moments and its update count
    trainer_state/state.json                   position in the demonstrations, adaptive KL coefficient
    steps.json                                 metrics of each step
    manifest.json                              origin, and the digest of every file
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rft_platform.algorithms.kl import KlControl
from rft_platform.algorithms.spec import CriticSpec, LoraSpec, OptimizerSpec
from rft_platform.common.digests import defers_state
from rft_platform.common.errors import DamagedError, UserError
from rft_platform.common.files import read_json
from rft_platform.common.recorded_paths import CHECKPOINT_PREFIX, from_manifest
from rft_platform.training.checkpoint.manifest import Manifest, identify, read_manifest, verified_weights, verify
from rft_platform.training.distributed import Ranks
from rft_platform.training.models.critic import Critic, load_critic
from rft_platform.training.models.loading import load_policy
from rft_platform.training.models.optimizer import build_optimizer, restore_moments
from rft_platform.training.models.shards import TRAINER_STATE
from rft_platform.training.models.trainer_state import TrainerState, restore_random_state

#: Files in ``TRAINER_STATE`` that are not sharded.
RANDOM, STATE = "random.safetensors", "state.json"
CRITIC, MOMENTS, UPDATES = "critic", "moments", "updates.json"  # the critic's folder, and files in this folder


@dataclass(frozen=True, slots=True)
class Position:
    """How many demonstrations or pairs (``rows``) were taken from the endless shuffled stream of one file and seed."""

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
    critic: CriticSpec | None = None,
) -> TrainerState:
    """Load the state in ``folder``: a platform checkpoint, whose digests are verified, or any Hugging Face model.

    ``version`` is the caller's count of optimiser steps up to this state. ``fresh`` drops the optimizer's moments. A
    ``critic`` continues from the checkpoint's critic, if there is one. Raises UserError if ``lora`` does not fit the
    checkpoint, and DamagedError if the base model's weights are not those on which a saved adapter was trained.
    """
    origin = ranks.from_first(lambda: _inspect(folder))
    saved, base_model = _saved_lora(origin), origin["base_model"]
    if saved is not None and lora != saved:
        raise UserError(
            f"{folder} holds a LoRA adapter of {saved}, but the configuration requests {lora}: use the same settings"
        )
    weights = Path(base_model) if base_model else folder
    resumed = origin["trained"] and saved == lora and not fresh
    policy = load_policy(
        weights,
        ranks,
        dtype,
        lora=None if saved else lora,
        adapter=folder if saved else None,
        seed=seed,
        resumed=resumed,
    )
    optimizer = build_optimizer(policy.model, spec)
    values = None
    if critic is not None:
        values = _read_critic(folder / TRAINER_STATE, weights, critic, ranks, dtype, fresh=not resumed)
    torch.manual_seed(seed)
    if resumed:
        restore_moments(policy.model, optimizer, folder / TRAINER_STATE)
        restore_random_state(load_file(folder / TRAINER_STATE / RANDOM))
    return TrainerState(
        policy=policy,
        optimizer=optimizer,
        folder=folder,
        digest=origin["digest"] if resumed else "",
        weights_digest=origin["weights_digest"],
        policy_version=version,
        base_model=weights if lora else None,
        base_digest=(origin["base_digest"] if saved else origin["weights_digest"]) if lora else None,
        lora=lora,
        critic=values,
        kl_control=_read_kl_control(folder) if resumed else None,
    )


def _inspect(folder: Path) -> dict[str, Any]:
    """Verify ``folder`` and describe it as JSON values. One rank does this for all ranks."""
    if not any(folder.glob("tokenizer*")):
        raise UserError(
            f"model folder {folder} holds no tokenizer (tokenizer.json): engines could not serve the checkpoints "
            "trained from it; save the tokenizer into the folder"
        )
    manifest = read_manifest(folder)
    if manifest is None:
        return {
            "digest": identify(folder),
            "weights_digest": verified_weights(folder),
            "trained": False,
            "lora": None,
            "base_model": None,
            "base_digest": None,
        }
    verify(folder, manifest)
    base_model = _base_model(folder, manifest)
    return {
        "digest": manifest.state_digest,
        "weights_digest": manifest.weights_digest,
        "trained": True,
        "lora": manifest.lora,
        "base_model": base_model,
        "base_digest": None if base_model is None else _check_base(folder, manifest, base_model),
    }


def _base_model(folder: Path, manifest: Manifest) -> str | None:
    """The folder of the full weights below an adapter, also after both were moved; None without an adapter."""
    if manifest.base_model is None:
        return None
    published = folder.name.startswith(CHECKPOINT_PREFIX)  # otherwise ``folder`` is an intermediate checkpoint
    placed = folder if published else folder.parent
    return str(from_manifest(manifest.base_model, manifest.request.get("output"), placed))


def _check_base(folder: Path, manifest: Manifest, base_model: str) -> str:
    """Return the digest of the full weights below an adapter. Raises DamagedError if it is not the manifest's."""
    found = verified_weights(Path(base_model))
    if manifest.base_digest not in (None, found):
        raise DamagedError(
            f"base model {base_model}: holds other weights (sha256 {found}) than the adapter in {folder} was "
            f"trained on (sha256 {manifest.base_digest}); restore them, or train from a checkpoint without an adapter"
        )
    return found


def _saved_lora(origin: dict[str, Any]) -> LoraSpec | None:
    saved = origin["lora"]
    if saved is None:
        return None
    modules = saved["target_modules"]
    return LoraSpec(saved["rank"], saved["alpha"], modules if isinstance(modules, str) else tuple(modules))


def read_position(folder: Path) -> Position | None:
    """Return the position in the demonstrations or pairs after the training that made ``folder``; None without any."""
    file = folder / TRAINER_STATE / STATE
    saved = read_json(file)["position"] if file.exists() else None
    return None if saved is None else Position(**saved)


def _read_kl_control(folder: Path) -> KlControl | None:
    file = folder / TRAINER_STATE / STATE
    return KlControl.of(read_json(file).get("kl_control")) if file.exists() else None


def _read_critic(
    folder: Path, body: Path, spec: CriticSpec, ranks: Ranks, dtype: torch.dtype, *, fresh: bool
) -> Critic:
    """Read the critic from ``folder``, a checkpoint's ``trainer_state``, onto any number of ranks.

    If the checkpoint has no critic, a new critic starts from ``spec.folder`` or, if that is None, from the model in
    ``body``. ``fresh`` resets the moments and the update count, but keeps the weights.
    """
    saved = folder / CRITIC
    found = saved.is_dir() and not (fresh and defers_state(folder.parent))
    source = saved if found else Path(spec.folder).absolute() if spec.folder else body
    if source not in (saved, body):  # ``saved`` and ``body`` were verified with the checkpoint
        ranks.from_first(lambda: verified_weights(source))
    model = load_critic(source, ranks, dtype)
    optimizer = build_optimizer(model.model, spec.optimizer)
    updates = 0
    if found and not fresh:
        restore_moments(model.model, optimizer, saved)
        updates = read_json(saved / UPDATES)["updates"]
    return Critic(model, optimizer, updates, spec.folder)
