"""Section ``policies``: names, paths, and what several policies do not go with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.allowed_changes import check_unchanged
from rft_platform.config.dry_run import run_plan
from rft_platform.config.load import load_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from tests.support.builders import problems

MakeConfig = Callable[..., RftConfig]
PLAYERS = {"buffer__explorer_input__taskset__workflow": "games:play", "algorithm__repeat_times": 4}


@pytest.fixture
def make_players(make_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    """The same with a second policy."""

    def make(names: tuple[str, ...] = ("rival",), **settings: Any) -> RftConfig:
        policies = [{"name": name, "model_path": str(tmp_path / "model")} for name in names]
        return make_config(**{**PLAYERS, "policies": policies, **settings})

    return make


def test_a_second_policy_is_taken(make_players: MakeConfig) -> None:
    config = make_players()
    assert problems(config) == []
    plan = run_plan(resolve(config), gpu_count=0)
    assert [line for line in plan.sections["processes"] if line.startswith("policy")] == [
        "policy     rival, transformers engine, 1 x cpu"
    ]
    with pytest.raises(UserError, match=r"(?s)other settings.*policies"):
        check_unchanged(config, make_players(("other",)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"names": ("a", "b", "a")}, "policies[2].name 'a' is also the name of another policy"),
        ({"names": ("aside",)}, "policies[0].name 'aside' is the name of a folder of checkpoints"),
        ({"explorer__auxiliary_models": [{"name": "Rival", "base_url": "http://x/v1", "model": "m"}]},
         "policies[0].name 'rival' is also the name of an auxiliary model"),
        ({"buffer__explorer_input__taskset__workflow": "single_turn"}, "calls only the first policy"),
        ({"mode": "bench", "buffer__explorer_input__eval_tasksets": [{"path": "held-out.jsonl"}]},
         "mode bench cannot be combined"),
        ({"mode": "explore"}, "mode explore cannot be combined with policies: set it to both"),
        ({"model__lora_configs": [{"lora_rank": 8}]}, "model.lora_configs cannot be combined with policies"),
        ({"synchronizer__sync_style": "dynamic_by_explorer"}, "sync_style dynamic_by_explorer cannot be combined"),
        ({"buffer__trainer_input__experience_buffer__replay_buffer__enable": True},
         "replay_buffer.enable cannot be combined"),
        ({"algorithm__algorithm_type": "ppo"}, "algorithm_type ppo cannot be combined with policies"),
        ({"algorithm__algorithm_type": "on_policy_distill", "algorithm__teacher_model_path": "owner/model"},
         "algorithm_type on_policy_distill cannot be combined with policies"),
        ({"data_processor__experience_pipeline__operators":
          [{"name": "dynamic_sampling", "args": {"max_batches": 3}}]},
         "algorithm.filters.max_batches (dynamic sampling) cannot be combined with policies: set it to 1"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(make_players: MakeConfig, settings: dict[str, Any], expected: str) -> None:
    assert any(expected in line for line in problems(make_players(**settings))), problems(make_players(**settings))


def test_a_warm_start_is_refused(make_players: MakeConfig, tmp_path: Path) -> None:
    config = make_players(warm_start={"path": str(tmp_path / "train.jsonl")})
    assert any(line.startswith("warm_start cannot be combined with policies") for line in problems(config))


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "rival").mkdir()
    file = tmp_path / "rft.yaml"
    file.write_text("policies: [{name: rival, model_path: ./rival}]\n")
    assert load_config(file).policies[0].model_path == str(tmp_path / "rival")


@pytest.mark.parametrize("name", ["Rival", "a/b", "", "-x"])
def test_a_name_is_that_of_a_folder(make_players: MakeConfig, name: str) -> None:
    with pytest.raises(UserError, match="name"):
        make_players((name,))
