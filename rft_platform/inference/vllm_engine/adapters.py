"""Check LoRA adapters for vLLM: which layers they adapt, and their rank.

Linear layers except the output head may be adapted, up to the rank for which the engine was started.
"""

import re
from pathlib import Path

from rft_platform.common.errors import WeightMismatchError
from rft_platform.inference.serving.weight_files import EMBEDDING, HEAD, Layout, check_names, read_headers

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def target_modules(layout: Layout) -> list[str]:
    """Last parts of the names of the linear layers that may be adapted.

    The output head is excluded: vLLM cannot score prompts if the head has an adapter, and the canary check scores them.
    """
    names = [name for name, shape in layout.shapes.items() if len(shape) == 2 and _is_linear(name)]
    return sorted({name.split(".")[-2] for name in names})


def check_adapter(layout: Layout, folder: Path, max_rank: int) -> None:
    """Raise WeightMismatchError unless the adapter in ``folder`` is complete, fits, and has at most ``max_rank``."""
    shapes = {name: place.shape for name, place in read_headers(folder).items()}
    expected: set[str] = set()
    for name, shape in shapes.items():
        match = _TENSOR.fullmatch(name)
        weight = f"{match['module']}.weight" if match else ""
        if match is None or weight not in layout.shapes or not _is_linear(weight):
            continue
        stem = name.removesuffix(f"{match['side']}.weight")
        expected |= {f"{stem}A.weight", f"{stem}B.weight"}
        _check_shape(folder, name, shape, match["side"], layout.shapes[weight], max_rank)
    check_names(set(shapes), expected, folder)


def _check_shape(
    folder: Path, name: str, shape: tuple[int, ...], side: str, linear: tuple[int, ...], max_rank: int
) -> None:
    rank, width = (shape[0], shape[-1]) if side == "A" else (shape[-1], shape[0])
    expected_width = linear[1] if side == "A" else linear[0]
    if len(shape) != 2 or width != expected_width:
        raise WeightMismatchError(f"{folder}: {name} has shape {shape}, which does not fit a layer of shape {linear}")
    if rank > max_rank:
        raise WeightMismatchError(
            f"{folder}: {name} has rank {rank}, but the engine was started for ranks up to {max_rank}: set "
            f"engine.max_lora_rank to {rank} or more"
        )


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and name != HEAD and not name.endswith(EMBEDDING)
