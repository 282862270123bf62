"""How workflows are run: what of it is refused, and what has no effect."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.common.errors import UserError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.findings import refuse
from rft_platform.config.load import load_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from tests.support.findings import warnings_of

MakeConfig = Callable[..., RftConfig]


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"python": sys.executable}, "explorer.workers.python is .* set explorer.workers.kind to process"),
        ({"count": 3}, r"explorer\.workers\.count is 3, but workflows run in this process"),
        ({"kind": "process", "python": "/no/such/python"}, "/no/such/python: no such program"),
    ],
)
def test_workers_that_cannot_be_are_refused(make_config: MakeConfig, workers: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        refuse(settings_findings(resolve(make_config(explorer__workers=workers)), Machine(2, 0)))
    sound = make_config(explorer__workers={"kind": "process", "python": sys.executable, "count": 2})
    refuse(settings_findings(resolve(sound), Machine(2, 0)))


ON_RAY = {"kind": "process", "runtime_env": {"env_vars": {"TOWN": "Ulm"}}}


@pytest.mark.parametrize(
    ("kind", "workers", "message"),
    [
        ("local", ON_RAY, r"runtime_env: Ray builds it .* but cluster.kind is local .* leave it out \(on one machine"),
        ("ray", ON_RAY | {"kind": "inprocess"}, r"runtime_env: .* explorer.workers.kind inprocess; set them to ray"),
        (
            "ray",
            ON_RAY | {"python": sys.executable, "runtime_env": {"uv": ["x"]}},
            "runtime_env: pip and uv install for Ray's",
        ),
        (
            "ray",
            ON_RAY | {"runtime_env": {"env_vars": {"APP_KEY": "12345678"}}},
            "runtime_env.env_vars.APP_KEY is a .* by its name",
        ),
        (
            "ray",
            ON_RAY | {"runtime_env": {"pip": {"packages": [], "index": "https://me:pw-of-mine@host/simple"}}},
            r"runtime_env.pip.index 'https://\*\*\*@host/simple' contains a .* configurations are stored",
        ),
    ],
)
def test_runtime_environments_that_cannot_be_are_refused(
    make_config: MakeConfig, kind: str, workers: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=f"explorer.workers.{message}") as refused:
        refuse(settings_findings(resolve(make_config(cluster__kind=kind, explorer__workers=workers)), Machine(2, 0)))
    assert "12345678" not in str(refused.value) and "pw-of-mine" not in str(refused.value)
    refuse(settings_findings(resolve(make_config(cluster__kind="ray", explorer__workers=ON_RAY)), Machine(2, 0)))


def test_an_unknown_field_of_a_runtime_environment_is_refused_with_the_known_ones(make_config: MakeConfig) -> None:
    expected = "got the fields env_var; expected env_vars, working_dir, py_modules, pip, uv, config"
    with pytest.raises(UserError, match=f"explorer.workers.runtime_env: {expected}"):
        make_config(explorer__workers={"kind": "process", "runtime_env": {"env_var": {"TOWN": "Ulm"}}})
    with pytest.raises(UserError, match=r"runtime_env.env_vars.TOWN: got \['Ulm'\]; input should be a valid string"):
        make_config(explorer__workers={"kind": "process", "runtime_env": {"env_vars": {"TOWN": ["Ulm"]}}})


def test_paths_of_a_runtime_environment_are_relative_to_the_file(tmp_path: Path) -> None:
    given: dict[str, Any] = {"working_dir": "./code", "py_modules": ["./code/town", "https://host/town.zip"]}
    file = tmp_path / "project.yaml"
    file.write_text(yaml.safe_dump({"explorer": {"workers": {"runtime_env": given | {"pip": "./needs.txt"}}}}))
    env = load_config(file).explorer.workers.runtime_env
    assert env.working_dir == str(tmp_path / "code") and env.pip == str(tmp_path / "needs.txt")
    assert env.py_modules == [str(tmp_path / "code" / "town"), "https://host/town.zip"]
    assert env.folders == [str(tmp_path / "code"), str(tmp_path / "code")]
    assert set(env.fields) == {"working_dir", "py_modules", "pip", "config"}


def test_settings_without_effect_on_single_turn_are_reported(make_config: MakeConfig) -> None:
    explorer = {"over_rollout": {"ratio": 0.1, "wait_after_min": 5}, "dynamic_timeout": {"enable": True}}
    config = make_config(explorer=explorer | {"workers": {"kind": "process"}})
    said = [line for line in warnings_of(config) if "single_turn" in line]
    assert [line.split()[0] for line in said] == [
        "explorer.over_rollout",
        "explorer.dynamic_timeout",
        "explorer.workers",
    ]
    agents = make_config(explorer=explorer, buffer__explorer_input__taskset__workflow="calculator")
    assert not [line for line in warnings_of(agents) if "explorer." in line]
    patience = resolve(agents).limits.patience
    assert (patience.over_ratio, patience.wait_after_min_s, patience.dynamic_ratio) == (0.1, 5.0, 3.0)
    assert resolve(make_config()).limits.patience.dynamic_ratio is None
