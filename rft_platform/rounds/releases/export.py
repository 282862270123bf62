"""Export a version of the policy for other programs: full weights, tokenizer, configuration and model card.

A LoRA adapter is merged into its base model. The folder can be uploaded to the Hugging Face hub.
"""

import shutil
from pathlib import Path

from rft_platform.common.digests import checkpoint_damage, digest_once, digest_weights
from rft_platform.common.errors import DamagedError, TransientError, UserError
from rft_platform.common.files import atomic_path, read_sealed_json
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.common.redaction import redact
from rft_platform.model_registry.mlflow_model import full_weights_of, has_weights, is_adapter, model_files
from rft_platform.object_store.mirror import fetch_missing
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.reporting.lineage import CheckpointTrace
from rft_platform.rounds.reporting.model_card import CardFacts, model_card
from rft_platform.rounds.reporting.round_history import evaluated_weights

CARD = "README.md"
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")


def export_model(project: Project, trace: CheckpointTrace, target: Path) -> str:
    """Write the newest weights of ``trace`` into the new folder ``target``; returns their digest.

    The folder appears when it is complete. Raises UserError if ``target`` exists or the checkpoint has no weights, and
    DamagedError if the weights, or the base model below an adapter, are not those that were written.
    """
    newest = trace.trainings[0]
    folder = Path(newest.result.checkpoint)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists: name a new folder")
    _check(folder)
    merged = is_adapter(folder)
    base = full_weights_of(folder) if merged else Path(trace.base_model)
    with atomic_path(target) as temporary:
        temporary.mkdir()
        _write_weights(folder, base if merged else None, temporary)
        for file in (file for pattern in _LICENCES for file in base.glob(pattern) if file.is_file()):
            shutil.copyfile(file, temporary / file.name)
        facts = CardFacts(
            title=f"{project.model_name}-v{newest.result.policy_version}",
            tasksets=[taskset.known_as for taskset in project.config.buffer.explorer_input.eval_tasksets],
            weights_digest=digest_weights(temporary),
            merged=merged,
            licence=_licence(base),
        )
        policy = str(newest.more.get("policy") or DEFAULT_POLICY)
        evaluated = evaluated_weights(project.store, newest.weights_digest, policy)
        (temporary / CARD).write_text(model_card(trace, evaluated, facts), encoding="utf-8")
    return facts.weights_digest


def push_to_hub(folder: Path, repository: str) -> str:
    """Upload an exported folder to a model repository of the hub, ORG/NAME; returns the address of the commit.

    A new repository is private. The token is that of the environment variable ``HF_TOKEN``, or of ``hf auth login``.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export of rft_platform")
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        kind = UserError if isinstance(error, HfHubHTTPError) else TransientError
        raise kind(
            f"the upload to {repository} failed ({redact(str(error))}); {folder} is complete: repeat the upload with "
            f"`hf upload {repository} {folder}`"
        ) from error
    return str(done.commit_url)


def check_hub(repository: str) -> None:
    """Raise UserError unless ``repository`` is a valid ORG/NAME and there is a token, before weights are written."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"--push hub:{repository}: expected hub:ORG/NAME: {error}") from error
    if repository.count("/") != 1:
        raise UserError(f"--push hub:{repository}: expected hub:ORG/NAME")
    if get_token() is None:
        raise UserError("--push needs a token of the Hugging Face hub that may write: set HF_TOKEN")


def _check(folder: Path) -> None:
    fetch_missing(folder)
    damage = checkpoint_damage(folder, digest_once)
    if damage is not None:
        raise DamagedError(f"checkpoint {folder}: {damage}")
    if not (is_adapter(folder) or has_weights(folder)):
        raise UserError(f"{folder} holds the state of a training without weights (trainer.save_hf_checkpoint: never)")
    if not is_adapter(folder):
        return
    base, expected = full_weights_of(folder), read_sealed_json(folder / "manifest.json").get("base_digest")
    if expected is not None and digest_weights(base, digest_once) != expected:
        raise DamagedError(f"base model {base}: holds other weights than the adapter in {folder} was trained on")


def _write_weights(folder: Path, base: Path | None, target: Path) -> None:
    """Copy the model files of a checkpoint; with ``base`` the checkpoint holds an adapter, which is merged into it."""
    if base is not None:
        from rft_platform.inference.transformers_engine.weights import merged_model

        merged_model(base, folder).save_pretrained(target)
    for file in model_files(folder):
        if base is None or (".safetensors" not in file.name and not file.name.startswith("adapter_")):
            shutil.copyfile(file, target / file.name)


def _licence(base: Path) -> str | None:
    """The licence that the base model's card names."""
    from huggingface_hub import metadata_load

    card = base / CARD
    known = (metadata_load(card) or {}).get("license") if card.is_file() else None
    return str(known) if known else None
