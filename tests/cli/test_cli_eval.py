"""Which policy `rft eval` measures."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rft_platform.cli.commands.evaluate import chosen_policy
from rft_platform.common.digests import MANIFEST
from rft_platform.common.files import write_sealed_json

PROJECT: Any = SimpleNamespace(
    config=SimpleNamespace(buffer=SimpleNamespace(explorer_input=SimpleNamespace(eval_tasksets=["held-out"])))
)


def test_a_checkpoint_has_the_version_and_the_round_of_its_manifest(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    model = chosen_policy(PROJECT, None, tmp_path, None)
    assert (model.policy_version, model.round) == (0, 0)
    origin = {"parent": "base", "parent_version": 0, "weights_digest": "d", "lineage": {"round": 3}}
    write_sealed_json(tmp_path / MANIFEST, {"policy_version": 12, **origin})
    policy = chosen_policy(PROJECT, None, tmp_path, None)
    assert (policy.policy_version, policy.round, policy.weights_digest) == (12, 3, model.weights_digest)
