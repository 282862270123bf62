"""Convert the content of another system's configuration file: its keys by the table ``KEYS``, and its names."""

from collections.abc import Iterator
from copy import deepcopy

from rft_platform.common.errors import UserError
from rft_platform.config.foreign.algorithms import convert_algorithm
from rft_platform.config.foreign.keys import KEYS
from rft_platform.config.foreign.stages import convert_stages
from rft_platform.config.foreign.tasksets import convert_tasksets
from rft_platform.config.foreign.treatments import Data, apply, value_at

_OF_VERL = "actor_rollout_ref"
_TINKER_RANK = 16  # the service's default rank of an adapter


def convert(data: Data, source: str, *, own_functions: bool = False) -> tuple[Data, tuple[str, ...]]:
    """A copy of ``data`` with the keys and names of this platform, and one line for each difference.

    ``own_functions``: the caller replaces the workflows that the file names.
    Raises UserError for a key that the platform cannot support; the message begins with ``source``.
    """
    if _OF_VERL in data:
        raise UserError(
            f"{source}: {_OF_VERL} is a section of verl, whose files are not converted: write a new file "
            "(docs/guide.md), with the model, the batch sizes and the learning rate of this one"
        )
    converted = deepcopy(data)
    notices: list[str] = []
    try:
        notices += convert_stages(converted)
        for key, treatment in KEYS:
            notices += apply(converted, key, treatment)
        notices += _convert_tinker(converted)
        notices += convert_tasksets(converted, own_functions)
        notices += convert_algorithm(converted)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return converted, tuple(dict.fromkeys(notices))


def _convert_tinker(data: Data) -> Iterator[str]:
    """Replace a training on a paid service by an adapter of the same rank that is trained here.

    Yields one line for each setting without effect. Raises UserError if the file gives the service's address.
    """
    model = data.get("model")
    settings = model.pop("tinker", None) if isinstance(model, dict) else None
    if not isinstance(settings, dict) or not settings.get("enable"):
        return
    if settings.get("base_url"):
        raise UserError(f"model.tinker.base_url {settings['base_url']}: Tinker is a paid service; remove model.tinker")
    if not value_at(data, "model.lora_configs"):
        data["model"]["lora_configs"] = [{"lora_rank": settings.get("rank") or _TINKER_RANK}]
    serving = value_at(data, "explorer.rollout_model")
    if isinstance(serving, dict) and serving.pop("engine_num", None) not in (None, 1):
        yield "explorer.rollout_model.engine_num has no effect here: model.tinker counts connections by it"
    yield "model.tinker has no effect here: Tinker is a paid service; a LoRA adapter is trained on this machine instead"
