"""The registry: entries come from the modules of a package, names are taken once."""

from pathlib import Path

import pytest

from rft_platform.algorithms.advantages.registry import ADVANTAGES
from rft_platform.algorithms.common.registry import REGISTRIES, Registry, unknown_name
from rft_platform.algorithms.losses.registry import LOSSES
from rft_platform.common.errors import UserError


def test_every_module_of_the_package_is_imported_automatically() -> None:
    assert ADVANTAGES.names() == ["asymre", "gigpo", "grpo", "opmd", "remax", "rloo", "step_wise_grpo"]
    assert LOSSES.names() == [
        "cispo", "clip_b", "clip_cov", "clip_v", "dpo", "gkd", "gmpo", "gspo", "hinge", "ipo", "kl_cov", "kto", "mix",
        "opmd", "orpo", "ppo", "rec", "reinforce", "sapo", "sft", "simpo", "sppo", "topr",
    ]  # fmt: skip


def here() -> None:
    """A function of this module."""


def test_a_name_is_taken_once() -> None:
    registry: Registry[int] = Registry("number", "rft_platform.algorithms.losses")
    registry.add("one", 1, here)
    assert registry.get("one") == 1
    with pytest.raises(ValueError, match=f"'one' is already registered, by {__name__}"):
        registry.add("one", 2, here)
    with pytest.raises(UserError, match="unknown number 'two': known are one"):
        registry.get("two")
    registry.forget(__name__)
    registry.add("one", 3, here)
    assert registry.get("one") == 3


def test_the_nearest_name_is_offered() -> None:
    assert unknown_name("colour", "gren", ["red", "green"]) == (
        "unknown colour 'gren': did you mean 'green'? known are green, red"
    )


def test_a_failed_import_leaves_no_partly_filled_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "half_filled"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "broken.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[int] = Registry("number", "half_filled")
    REGISTRIES.remove(registry)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
            registry.names()
