"""Every policy loss through the whole trainer, from rollouts to a checkpoint; filters that leave nothing; plugins."""

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from rft_platform.algorithms.common.registry import REGISTRIES
from rft_platform.algorithms.losses.registry import LOSSES
from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import UserError
from rft_platform.judging.operators.filters import DYNAMIC_SAMPLING

POLICY_GRADIENT = sorted(name for name in LOSSES.names() if LOSSES.get(name).policy_gradient)


def ignore(*_: object) -> bool:
    return False


def first_metrics(session: Any, request: Any) -> dict[str, float]:
    events: list[Any] = []
    session.train(request, events.append, ignore)
    found: dict[str, float] = events[0].metrics
    return found


@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_every_loss_trains(session: Any, round_request: Any, tiny_model: Path, name: str, mode: Any) -> None:
    request = round_request(groups=4, algorithm=AlgorithmSpec(policy_loss=name, correction=mode))
    events: list[Any] = []
    result = session.train(request, events.append, ignore)
    assert result.steps == 1
    assert result.weights_digest != digest_weights(tiny_model)
    assert 0 < events[0].metrics["grad_norm"] < 100


@pytest.mark.slow
def test_on_fresh_data_the_ratio_losses_agree(session: Any, round_request: Any) -> None:
    """Decoupled, the ratio is 1 at the first step: clip, gate and weight of all of them leave the same gradient."""
    norms = {
        name: first_metrics(
            session,
            round_request(groups=4, algorithm=AlgorithmSpec(policy_loss=name, correction="decoupled", weight_cap=1e9)),
        )["grad_norm"]
        for name in ("ppo", "cispo", "sapo", "topr", "reinforce")
    }
    assert list(norms.values()) == pytest.approx([norms["ppo"]] * len(norms), rel=1e-4)


def test_a_round_of_which_filters_leave_nothing_is_a_recorded_no_op(
    session: Any, round_request: Any, tiny_model: Path
) -> None:
    def drop_all(rows: Any, judged: Any) -> None:
        for row in judged:
            row.dropped_by, row.advantage = DYNAMIC_SAMPLING, 0.0

    result = session.train(round_request(edit=drop_all), ignore, ignore)
    assert (result.steps, result.weights_digest) == (0, digest_weights(tiny_model))


def test_rows_that_a_filter_left_out_are_not_counted(session: Any, round_request: Any) -> None:
    def drop_half(rows: Any, judged: Any) -> None:
        for row in judged[: len(judged) // 2]:
            row.dropped_by, row.advantage = DYNAMIC_SAMPLING, 0.0

    kept = first_metrics(session, round_request(groups=4, edit=drop_half))
    assert kept["rows"] == 8
    assert kept["zero_advantage_share"] == 0


def test_rejection_sampling_imitates_what_was_kept(session: Any, round_request: Any) -> None:
    def keep_right(rows: Any, judged: Any) -> None:
        for row in judged:
            row.advantage, row.dropped_by = 0.0, None if row.reward >= 1 else "reward_filter"

    metrics = first_metrics(
        session, round_request(groups=4, edit=keep_right, algorithm=AlgorithmSpec(policy_loss="sft"))
    )
    assert metrics["rows"] == 8
    assert metrics["reward_mean"] == 1.0
    assert metrics["grad_norm"] > 0


@pytest.mark.slow
def test_a_plugins_loss_trains_and_its_code_is_part_of_the_requests_identity(
    session: Any, round_request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "rft_session_plugin.py"
    source = """
        from rft_platform.algorithms.losses.registry import TokenLoss, loss

        @loss("mine")
        def mine(tokens, *, power: float = 1.0):
            return TokenLoss(-tokens.advantage * tokens.logp * {factor}, {{"mine": tokens.advantage.abs().sum()}})
    """
    file.write_text(dedent(source.format(factor=1.0)))
    spec = AlgorithmSpec(policy_loss="mine", plugins=("rft_session_plugin",))
    with pytest.raises(UserError, match="unknown policy_loss_fn 'mine'"):
        session.train(round_request(groups=4, algorithm=AlgorithmSpec(policy_loss="mine")), ignore, ignore)
    try:
        request = round_request(groups=4, algorithm=spec)
        first = session.train(request, ignore, ignore)
        assert first.metrics["mine"] > 0
        assert session.train(request, ignore, ignore).reused
        file.write_text(dedent(source.format(factor=-2.0)))
        changed = session.train(request, ignore, ignore)
        assert not changed.reused
        assert changed.weights_digest != first.weights_digest
    finally:
        sys.modules.pop("rft_session_plugin", None)
        for registry in REGISTRIES:
            registry.forget("rft_session_plugin")
