"""Check from a model's config.json whether it can be trained, before any process starts. No weights are read."""

from pathlib import Path

from rft_platform.cluster.this_process import NOT_FOR_TRANSFORMERS, importing
from rft_platform.common.errors import UserError


def check_trainable(folder: Path, longest: int | None) -> None:
    """Raise UserError if the model in ``folder`` cannot be trained on rows of ``longest`` tokens.

    ``longest`` None means the model's whole context. The model is built without memory for its weights and passes the
    same checks as when it is loaded.
    """
    with importing(without=NOT_FOR_TRANSFORMERS):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

    from rft_platform.training.packed.model_support import check_window
    from rft_platform.training.packed.packed_policy import PackedPolicy

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises many error types for an unknown config.json
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder}: transformers cannot build a causal LM from its config.json: {reason}") from error
    PackedPolicy(model)
    check_window(model, longest)


def problems(folders: list[str], longest: int | None) -> list[str | None]:
    """The problem of each model folder, or None."""
    found: list[str | None] = []
    for folder in folders:
        try:
            check_trainable(Path(folder), longest)
        except UserError as error:
            found.append(str(error))
        else:
            found.append(None)
    return found
