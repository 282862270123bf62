"""Check in a separate process whether the trainer accepts a run's models.

Building a model imports transformers, which takes seconds and 500 MB, and in a notebook warns about missing widgets.
The process runs in parallel with the other checks of a run. An accepted model is remembered and not built again.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rft_platform.algorithms.spec import LoraSpec
from rft_platform.cluster.child import AnswerTimeoutError, CallError, Child, ChildError
from rft_platform.common.errors import RftError, UserError
from rft_platform.common.files import atomic_path
from rft_platform.config.resolve import policies_of
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.config.training_specs import lora_spec

_TRAINING_MODES = ("both", "train", "colocate")
_PROGRAM = "rft_platform.training.packed.model_check"
_CHECKED_BY = ("model_check", "model_support", "packed_policy")  # after a change of these modules, check again
_PACKAGES = ("rft_platform", "torch", "transformers")
_LIMIT_S = 300.0  # the first import of transformers from a network file system takes minutes


class ModelCheck:
    """A running check: the models, and the process that builds them."""

    def __init__(self, models: Mapping[str, Path], longest: int | None, lora: LoraSpec | None = None) -> None:
        """Start to check ``models`` (by the key of rft.yaml that names them) for rows of ``longest`` tokens.

        ``lora``: the adapter to train instead of the full weights.
        """
        self._arguments = (longest, None if lora is None else asdict(lora))
        accepted = {key: _accepted(folder, *self._arguments).is_file() for key, folder in models.items()}
        self._models = {key: folder for key, folder in models.items() if not accepted[key]}
        self._child = self._start() if self._models else None

    def _start(self) -> Child:
        child = Child(_PROGRAM, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        child.send("problems", [str(folder) for folder in self._models.values()], *self._arguments, wall_s=_LIMIT_S)
        return child

    def problems(self) -> Iterator[str]:
        """Wait for the result; yield a line for each model that the trainer would refuse."""
        if self._child is None:
            return
        try:
            answers = self._child.answer()
        except AnswerTimeoutError:
            names = ", ".join(str(folder) for folder in self._models.values())
            raise RftError(f"{names}: building the model to check it took more than {_LIMIT_S:.0f} s") from None
        except (CallError, ChildError) as error:
            raise RftError(f"the check of the models failed: {error}") from None
        for (key, folder), problem in zip(self._models.items(), answers, strict=True):
            if problem is None:
                _remember(_accepted(folder, *self._arguments))
            else:
                yield f"{key}: {problem}"

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._child is not None:
            self._child.kill()


@contextmanager
def model_check(config: RftConfig) -> Iterator[ModelCheck]:
    """Check the policies in local folders that ``config`` trains, in parallel with the block."""
    from rft_platform.inference.launch.launcher import check_model_folder

    local: dict[str, Path] = {}
    for policy in policies_of(config).values() if config.mode in _TRAINING_MODES else ():
        with suppress(UserError):  # the check of the run's other settings reports this error
            folder = Path(policy.model_path)
            if folder.is_dir():
                check_model_folder(folder)
                local[policy.key] = folder
    check = ModelCheck(local, config.model.max_model_len, lora_spec(config))
    try:
        yield check
    finally:
        check.stop()


def _accepted(folder: Path, longest: int | None, lora: dict[str, Any] | None) -> Path:
    """The file in the user's cache that marks this model as accepted by this version of the check."""
    digest = hashlib.sha256(json.dumps([longest, lora, *(version(package) for package in _PACKAGES)]).encode())
    packed = Path(__file__).parents[1] / "training" / "packed"
    for file in (folder / "config.json", *(packed / f"{name}.py" for name in _CHECKED_BY)):
        digest.update(file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rft_platform" / "trainable_models" / digest.hexdigest()


def _remember(accepted: Path) -> None:
    with suppress(OSError):  # the cache is not writable: build the model again next time
        accepted.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(accepted) as path:
            path.touch()
