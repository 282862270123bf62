"""Every registered loss gives the same loss and gradients however its rows are ordered, packed and spread."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from invariance import rows_for, specs, step
from safetensors import safe_open
from small_model import build_model
from thread_ranks import ThreadRanks
from torch import Tensor

from rft_platform.algorithms.losses.registry import LOSSES
from rft_platform.training.data.samples import Sample
from rft_platform.training.models.loading import prepare_layers
from rft_platform.training.packed import attention
from rft_platform.training.packed.packed_policy import PackedPolicy
from rft_platform.training.packed.packing import StaticLengths

SPECS = specs()
TOLERANCE = 1e-5
Result = tuple[float, dict[str, Tensor]]
every_loss = pytest.mark.parametrize("name", SPECS)


class Trial:
    """A policy, a teacher, and each spec's result with every row computed by itself: what all others must equal."""

    def __init__(self) -> None:
        self.policy = PackedPolicy(build_model())
        self.teacher = PackedPolicy(build_model(seed=1))
        self.ranks = [PackedPolicy(build_model()) for _ in range(3)]
        self.prepared = PackedPolicy(build_model())
        with pytest.MonkeyPatch.context() as patch:  # the padding without the compiler, which takes minutes
            patch.setattr(torch, "compile", lambda function, **options: function)
            prepare_layers(self.prepared.causal, self.prepared.layers, checkpointing=True, compiled=True)
            self.prepared.static = StaticLengths()
        self._plain: dict[str, Result] = {}

    def run(self, name: str, rows: list[Sample] | None = None, **how: Any) -> Result:
        spec = SPECS[name]
        rows = rows_for(spec.policy_loss) if rows is None else rows
        metrics, gradients = step(self.policy, rows, spec, self.teacher, **how)
        return metrics["loss"], gradients

    def plain(self, name: str) -> Result:
        if name not in self._plain:
            self._plain[name] = self.run(name, max_tokens_per_pack=1, share_prefixes=False)
        return self._plain[name]


@pytest.fixture(scope="module")
def trial() -> Trial:
    return Trial()


def assert_equal(got: Result, want: Result) -> None:
    assert got[0] == pytest.approx(want[0], abs=TOLERANCE, rel=TOLERANCE)
    assert got[1].keys() == want[1].keys() != set()
    for name, gradient in want[1].items():
        scale = max(1.0, gradient.abs().max().item())
        assert (got[1][name] - gradient).abs().max().item() <= TOLERANCE * scale, name


@every_loss
def test_the_gradient_is_not_zero(trial: Trial, name: str) -> None:
    assert max(gradient.abs().max() for gradient in trial.plain(name)[1].values()) > 1e-3


@every_loss
def test_micro_batches(trial: Trial, name: str) -> None:
    for budget in (10_000, 60, 25):
        assert_equal(trial.run(name, max_tokens_per_pack=budget), trial.plain(name))


@every_loss
def test_trees_and_separate_rows(trial: Trial, name: str) -> None:
    for share in (True, False):
        assert_equal(trial.run(name, share_prefixes=share), trial.plain(name))


@every_loss
def test_order_of_rows(trial: Trial, name: str) -> None:
    rows = rows_for(SPECS[name].policy_loss)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    assert_equal(trial.run(name, [rows[i] for i in order], max_tokens_per_pack=40), trial.plain(name))


@every_loss
def test_padding(trial: Trial, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of attention padded to the largest, and none padded at all."""
    for cost in (10**9, 0):
        monkeypatch.setattr(attention, "BUCKET_COST", cost)
        assert_equal(trial.run(name), trial.plain(name))


@every_loss
def test_static_lengths_and_gradient_checkpointing(trial: Trial, name: str) -> None:
    """Packs padded as they are for ``torch.compile``, activations computed again in the backward pass."""
    spec = SPECS[name]
    metrics, gradients = step(trial.prepared, rows_for(spec.policy_loss), spec, trial.teacher)
    assert_equal((metrics["loss"], gradients), trial.plain(name))


@pytest.mark.slow
@every_loss
def test_three_ranks_with_many_few_and_no_rows(trial: Trial, name: str) -> None:
    rows = rows_for(SPECS[name].policy_loss)
    shares = [[r for r in rows if r.group > 0], [], [r for r in rows if r.group == 0]]
    assert_equal(_on_threads(trial, shares, name), trial.plain(name))


def test_a_sum_of_micro_batch_means_would_be_found(trial: Trial) -> None:
    """The comparison can fail: dividing each part by its own count is not dividing the whole once."""
    name = "ppo"
    rows = rows_for("ppo")
    parts = [trial.run(name, [r for r in rows if (r.group == 0) is first]) for first in (True, False)]
    mean = {key: (parts[0][1][key] + parts[1][1][key]) / 2 for key in parts[0][1]}
    with pytest.raises(AssertionError):
        assert_equal(((parts[0][0] + parts[1][0]) / 2, mean), trial.plain(name))


def _on_threads(trial: Trial, shares: list[list[Sample]], name: str) -> Result:
    """The loss, and the gradients averaged over ranks as FSDP does."""
    ranks = ThreadRanks(len(shares))
    found: dict[int, tuple[dict[str, float], dict[str, Tensor]]] = {}

    def work(rank: int) -> None:
        found[rank] = step(
            trial.ranks[rank], shares[rank], SPECS[name], trial.teacher,
            max_tokens_per_pack=30, reduce=ranks.reduce_of(rank), world_size=ranks.size,
        )  # fmt: skip

    _together([lambda rank=rank: work(rank) for rank in range(ranks.size)])
    assert all(found[rank][0] == found[0][0] for rank in found)
    mean = {key: torch.stack([found[rank][1][key] for rank in found]).mean(0) for key in found[0][1]}
    return found[0][0]["loss"], mean


def _together(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "losses"), [("pack", []), ("once", []), ("once-on-rank-0", ["ppo"])])
def test_two_processes_over_gloo(trial: Trial, tmp_path: Path, layout: str, losses: list[str]) -> None:
    """FSDP2 over two real ranks, for every loss. The ranks have different numbers of packs."""
    results = tmp_path / "results"
    results.mkdir()
    trial.policy.model.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    program = [Path(__file__).with_name("invariance.py"), tmp_path / "model", results, layout, *losses]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *map(str, program)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    files = sorted(results.iterdir())
    assert len(files) == len(losses or LOSSES.names())
    for file in files:
        with safe_open(file, "pt") as tensors:
            said = tensors.metadata()
            gradients = {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
        assert_equal((float(said["loss"]), gradients), trial.plain(said["spec"]))
        groups = len(trial.policy.layers) + 1  # that FSDP gathers and sums at once
        calls = json.loads(said["calls"])
        if layout == "once":
            scored_before = LOSSES.get(said["spec"]).mismatched
            assert calls == {"_reduce_scatter_base_": groups, "_allgather_base_": (1 + scored_before) * groups}
        else:  # a rank that does not want it decides for all
            assert calls["_reduce_scatter_base_"] >= 5 * groups and calls["_allgather_base_"] >= 8 * groups


def test_tokens_with_the_largest_covariances_are_selected(trial: Trial) -> None:
    rows = rows_for("kl_cov")
    metrics, _ = step(trial.policy, rows, SPECS["kl_cov"], trial.teacher)
    logp = np.concatenate([row.rollout_logprobs[row.loss_mask] for row in rows])  # type: ignore[index]
    advantage = np.concatenate([np.full(np.count_nonzero(row.loss_mask), row.advantage) for row in rows])
    covariance = (logp - logp.mean(dtype=np.float64)) * (advantage - advantage.mean())
    count = int(0.2 * len(logp))
    want = covariance >= np.sort(covariance)[-count]
    got = np.concatenate([row.selected[row.loss_mask] for row in rows])  # type: ignore[index]
    assert (got > 0).tolist() == want.tolist()
    assert metrics["selected"] == pytest.approx(count / len(logp))
    clipped, _ = step(trial.policy, rows, SPECS["clip_cov"], trial.teacher)
    assert clipped["selected"] > 0


def test_no_loss_is_left_out() -> None:
    assert {spec.policy_loss for spec in SPECS.values()} == set(LOSSES.names())
