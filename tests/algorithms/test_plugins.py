"""A user's module registers a loss and an advantage; both work, change with the file, and clash loudly."""

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch

from rft_platform.algorithms.advantages.registry import ADVANTAGES, compute_advantages
from rft_platform.algorithms.common.registry import REGISTRIES
from rft_platform.algorithms.losses.registry import LOSSES, TokenBatch, bind, loss
from rft_platform.algorithms.plugins import import_plugins, plugins_digest
from rft_platform.algorithms.presets import choose
from rft_platform.common.errors import UserError

NAME = "rft_test_plugin"
SOURCE = """
    from rft_platform.algorithms.advantages.registry import advantage
    from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss

    @advantage("signs", min_group=3)
    def signs(reward_N, group_N, run_N, step_N, *, scale: float = {scale}):
        return scale * (reward_N > 0)

    @loss("squared", correction="weight", whole_rows_if="rows")
    def squared(tokens: TokenBatch, *, rows: bool = False) -> TokenLoss:
        return TokenLoss(tokens.advantage * tokens.logp.square())
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / f"{NAME}.py"
    file.write_text(dedent(SOURCE.format(scale=2.0)))
    yield file
    sys.modules.pop(NAME, None)
    for registry in REGISTRIES:
        registry.forget(NAME)


def test_its_functions_are_chosen_by_name(plugin: Path) -> None:
    import_plugins([NAME])
    got = compute_advantages("signs", [1.0, -1.0, 2.0], ["x"] * 3, list("abc"), [0] * 3, scale=3.0)
    np.testing.assert_array_equal(got, [3.0, 0.0, 3.0])
    chosen = choose("grpo", advantage="signs", policy_loss="squared", policy_loss_args={"rows": True})
    assert (chosen.advantage, chosen.min_group, chosen.policy_loss) == ("signs", 3, "squared")
    bound = bind("squared", {"rows": True})
    assert bound.whole_rows and bound.correction == "weight"
    logp = torch.tensor([-2.0])
    tokens = TokenBatch(logp, torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), 1)
    assert bound.function(tokens).loss.item() == 4.0


def test_a_changed_file_is_imported_again(plugin: Path) -> None:
    import_plugins([NAME])
    before = plugins_digest([NAME])
    import_plugins([NAME])
    assert plugins_digest([NAME]) == before
    plugin.write_text(dedent(SOURCE.format(scale=17.25)))
    import_plugins([NAME])
    assert plugins_digest([NAME]) != before
    assert compute_advantages("signs", [1.0], ["x"], ["a"], [0]).tolist() == [17.25]
    assert plugins_digest([]) is None


def test_a_name_of_the_platform_is_not_taken_over(plugin: Path) -> None:
    plugin.write_text(plugin.read_text().replace('"signs"', '"grpo"'))
    with pytest.raises(UserError, match=r"'grpo' is already registered.*rft_test_plugin\.py:5"):
        import_plugins([NAME])
    assert ADVANTAGES.get("grpo").function.__module__.startswith("rft_platform.")


def test_a_plugin_that_fails_to_import_registers_nothing(plugin: Path) -> None:
    plugin.write_text(plugin.read_text() + "\nraise RuntimeError('later')\n")
    with pytest.raises(UserError, match="RuntimeError: later"):
        import_plugins([NAME])
    assert "signs" not in ADVANTAGES.names() and "squared" not in LOSSES.names()
    plugin.write_text(dedent(SOURCE.format(scale=4.125)))
    import_plugins([NAME])
    assert "signs" in ADVANTAGES.names()


def test_a_module_that_is_not_there_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"algorithm\.plugins: no_such_module .*is it on PYTHONPATH\?"):
        import_plugins(["no_such_module"])


TAUGHT = """
    from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss

    @loss("taught", policy_gradient=False, teacher=True, correction="none")
    def taught(tokens: TokenBatch, {options}) -> TokenLoss:
        return TokenLoss(2 * tokens.divergence)
"""


@pytest.mark.parametrize("options", ["beta: float = 0.5", "*, alpha: float = 0.5", "*, beta: float"])
def test_a_teacher_loss_must_name_its_divergence(plugin: Path, options: str) -> None:
    plugin.write_text(dedent(TAUGHT.format(options=options)))
    with pytest.raises(UserError, match=r"'taught', teacher=True\): expected a keyword-only option beta"):
        import_plugins([NAME])
    assert "taught" not in LOSSES.names()


def test_a_teacher_loss_carries_its_beta(plugin: Path) -> None:
    plugin.write_text(dedent(TAUGHT.format(options="*, beta: float = 0.25")))
    import_plugins([NAME])
    assert bind("taught", {}).beta == 0.25
    assert bind("taught", {"beta": 1.0}).beta == 1.0
    assert bind("dpo", {"beta": 0.2}).beta is None
    with pytest.raises(UserError, match=r"beta of the loss 'taught' is 1\.5: expected a number from 0"):
        bind("taught", {"beta": 1.5})


def test_an_option_that_needs_whole_rows_counts_by_default(plugin: Path) -> None:
    plugin.write_text(
        dedent("""
            from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss

            @loss("rowwise", whole_rows_if="trajectory")
            def rowwise(tokens: TokenBatch, *, trajectory: bool = True) -> TokenLoss:
                return TokenLoss(-tokens.logp)
        """)
    )
    import_plugins([NAME])
    assert bind("rowwise", {}).whole_rows and not bind("rowwise", {"trajectory": False}).whole_rows
    with pytest.raises(ValueError, match="whole_rows_if 'paths' is no option of"):
        loss("pathwise", whole_rows_if="paths")(LOSSES.get("rowwise").function)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A plugin of several files, the functions in one below."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / NAME
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("from . import losses\n")
    (folder / "losses.py").write_text(f"from .deep import *\n{dedent(SOURCE.format(scale='SCALE'))}")
    (folder / "deep" / "__init__.py").write_text("SCALE = 2.0\n")
    yield folder
    for module in [module for module in sys.modules if module.partition(".")[0] == NAME]:
        del sys.modules[module]
    for registry in REGISTRIES:
        registry.forget(NAME)


def test_a_change_of_any_file_reloads_the_package(package: Path) -> None:
    import_plugins([NAME])
    digests = [plugins_digest([NAME])]
    assert compute_advantages("signs", [1.0], ["x"], ["a"], [0]).tolist() == [2.0]
    (package / "deep" / "__init__.py").write_text("SCALE = 17.25\n")
    import_plugins([NAME])
    digests.append(plugins_digest([NAME]))
    assert compute_advantages("signs", [1.0], ["x"], ["a"], [0]).tolist() == [17.25]
    (package / "losses.py").write_text(dedent(SOURCE.format(scale=4.125)).replace('"signs"', '"other_signs"'))
    import_plugins([NAME])
    digests.append(plugins_digest([NAME]))
    assert compute_advantages("other_signs", [1.0], ["x"], ["a"], [0]).tolist() == [4.125]
    assert "signs" not in ADVANTAGES.names() and "squared" in LOSSES.names()
    import_plugins([NAME])
    assert len(set(digests)) == 3 and plugins_digest([NAME]) == digests[-1]


def test_a_package_that_fails_to_import_registers_nothing(package: Path) -> None:
    (package / "__init__.py").write_text("from . import losses\nraise RuntimeError('later')\n")
    with pytest.raises(UserError, match="RuntimeError: later"):
        import_plugins([NAME])
    assert "signs" not in ADVANTAGES.names() and "squared" not in LOSSES.names()
    (package / "__init__.py").write_text("from . import losses\n")
    import_plugins([NAME])
    assert "signs" in ADVANTAGES.names() and "squared" in LOSSES.names()


def test_a_module_with_a_similar_name_is_distinguished() -> None:
    ADVANTAGES.add("of_a_neighbour", ADVANTAGES.get("grpo"), type("", (), {"__module__": f"{NAME}_2"}))
    ADVANTAGES.forget(NAME)
    assert "of_a_neighbour" in ADVANTAGES.names()
    ADVANTAGES.forget(f"{NAME}_2")
    assert "of_a_neighbour" not in ADVANTAGES.names()
