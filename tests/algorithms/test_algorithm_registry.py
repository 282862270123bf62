"""The registry: entries come from the modules of a package, names are taken once."""

import pytest

from rft_platform.algorithms.advantages.registry import ADVANTAGES
from rft_platform.algorithms.losses.registry import LOSSES
from rft_platform.algorithms.registry import Registry, unknown_name
from rft_platform.errors import UserError


def test_every_module_of_the_package_is_found_without_being_named() -> None:
    assert ADVANTAGES.names() == ["grpo", "step_wise_grpo"]
    assert LOSSES.names() == ["ppo", "sft"]


def test_a_name_is_taken_once() -> None:
    registry: Registry[int] = Registry("number", "rft_platform.algorithms.losses")
    registry.add("one", 1)
    assert registry.get("one") == 1
    with pytest.raises(ValueError, match="'one' is registered twice"):
        registry.add("one", 2)
    with pytest.raises(UserError, match="unknown number 'two': known are one"):
        registry.get("two")


def test_the_nearest_name_is_offered() -> None:
    assert unknown_name("colour", "gren", ["red", "green"]) == (
        "unknown colour 'gren': did you mean 'green'? known are green, red"
    )
