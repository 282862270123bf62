"""How workflows are run: what of it is refused, and what has no effect."""

import sys
from collections.abc import Callable

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.findings import refuse
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
