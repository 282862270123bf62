"""docs/algorithms.md says what the code does: presets, functions and their arguments."""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from rft_platform.algorithms.advantages.registry import ADVANTAGES
from rft_platform.algorithms.aggregation import MODES
from rft_platform.algorithms.common.registry import REGISTRIES
from rft_platform.algorithms.losses.registry import LOSSES, TokenBatch
from rft_platform.algorithms.presets import PRESETS, Preset
from rft_platform.algorithms.token_advantages.registry import TOKEN_ADVANTAGES
from rft_platform.config.schema.algorithm import Algorithm

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: ADVANTAGES.get(name).function for name in ADVANTAGES.names()},
    **{name: TOKEN_ADVANTAGES.get(name).function for name in TOKEN_ADVANTAGES.names()},
}
GIVEN = {"env_state_hash", "step_reward", "temperature"}


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def cells(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip("`"): row[1:] for row in rows if row[0].startswith("`")}


def described(found: Preset) -> list[str]:
    runs = "1" if found.repeat_times == 1 else f"{found.repeat_times}, at least {found.min_group}"
    reference = {"never": "-", "if_beta": "if beta > 0", "always": "always"}[found.reference]
    return [
        found.policy_loss,
        found.advantage or found.token_advantage or "-",
        found.loss_agg_mode,
        reference,
        runs if found.trains_on == "rollouts" else "-",
    ]


def test_the_table_of_presets_is_the_codes() -> None:
    assert {name: row[:5] for name, row in cells(section("Presets")).items()} == {
        name: described(found) for name, found in PRESETS.items()
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_advantage_is_described_with_its_arguments(name: str) -> None:
    assert_arguments(cells(section("Advantages"))[name][-1], FUNCTIONS[name])


@pytest.mark.parametrize("name", LOSSES.names())
def test_every_loss_is_described_with_its_arguments(name: str) -> None:
    text = cells(section("Policy losses"))[name][-1]
    if name != "mix":  # its arguments are ppo's
        assert_arguments(text, LOSSES.get(name).function)


def assert_arguments(text: str, function: Callable[..., Any]) -> None:
    known = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for parameter in known:
        if parameter.name in GIVEN:
            continue
        assert f"`{parameter.name}" in text, f"{parameter.name} is not in: {text}"
        said = re.search(rf"`{parameter.name}: ([^`]+)`", text)
        if said:
            value = yaml.safe_load(said[1])
            assert (float(value) if re.fullmatch(r"\d+e-\d+", said[1]) else value) == parameter.default
    names = set(re.findall(r"`(\w+): [^`]+`", text))
    assert names <= {p.name for p in known} | {"whiten"}


def test_every_aggregation_is_described() -> None:
    assert tuple(cells(section("Aggregation"))) == MODES


def test_the_plugin_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "# my_rft.py" in block)
    (tmp_path / "my_rft.py").write_text(dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    settings = [Algorithm.model_validate(yaml.safe_load(block)["algorithm"]) for block in blocks]
    from rft_platform.algorithms.plugins import import_plugins

    try:
        import_plugins(settings[-1].plugins)
        ranked = ADVANTAGES.get(settings[-1].advantage_fn or "").function
        got = ranked(np.array([1.0, 3.0, 2.0]), np.zeros(3, int), np.arange(3), np.zeros(3, int))
        np.testing.assert_allclose(got, [-1 / 3, 1 / 3, 0.0], atol=1e-12)
        groups = np.array([0, 0, 1, 1, 1])
        equal = ranked(np.array([1.0, 1.0, 0.0, 0.0, 0.0]), groups, np.arange(5), np.zeros(5, int))
        assert equal.tolist() == [0.0] * 5, "equal rewards carry no signal"
        clipped = LOSSES.get(settings[-1].policy_loss_fn or "").function
        tokens = TokenBatch(torch.tensor([-1.0, -9.0]), torch.zeros(2), torch.ones(2), torch.zeros(2).long(), 1)
        assert clipped(tokens, **settings[-1].policy_loss_fn_args).loss.tolist() == [1.0, 4.0]
    finally:
        sys.modules.pop("my_rft", None)  # another test that needs it has to import its own
        for registry in REGISTRIES:
            registry.forget("my_rft")
