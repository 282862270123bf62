"""Presets name things that exist, and names that do not exist get an answer."""

import subprocess
import sys

import pytest

from rft_platform.algorithms.advantages.registry import ADVANTAGES
from rft_platform.algorithms.losses.registry import LOSSES
from rft_platform.algorithms.presets import PLANNED, PRESETS, check_group_size, preset
from rft_platform.errors import UserError


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_refers_to_registered_functions(name: str) -> None:
    found = preset(name)
    assert found.policy_loss in LOSSES.names()
    assert found.advantage is None or found.advantage in ADVANTAGES.names()
    assert found.repeat_times >= found.min_group


def test_planned_names_are_told_apart_from_typos() -> None:
    assert not PLANNED & set(PRESETS)
    with pytest.raises(UserError, match="'gspo' is not built yet"):
        preset("gspo")
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        preset("gprpo")


def test_a_group_of_one_is_refused_for_group_algorithms() -> None:
    with pytest.raises(UserError, match="Set repeat_times to 2 or more"):
        check_group_size("grpo", 1)
    check_group_size("grpo", 2)
    check_group_size("sft", 1)


def test_presets_and_advantages_load_without_torch() -> None:
    code = (
        "import sys; from rft_platform.algorithms.advantages.registry import ADVANTAGES; ADVANTAGES.names(); "
        "import rft_platform.algorithms.presets; assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
