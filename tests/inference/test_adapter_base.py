"""Which full weights an adapter is loaded on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import WeightMismatchError
from rft_platform.common.files import write_json, write_sealed_json
from rft_platform.inference.serving.weight_files import base_of
from rft_platform.inference.vllm_engine.weights import ServedWeights, Weights


@pytest.fixture
def other(tiny_model: Path, tmp_path: Path) -> Path:
    """A model of the same layout with other weights."""
    folder = shutil.copytree(tiny_model, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def adapter_on(base: Path | str, folder: Path) -> Path:
    folder.mkdir()
    write_json(folder / "adapter_config.json", {"base_model_name_or_path": str(base)})
    stem = "base_model.model.model.layers.0.self_attn.o_proj.lora"
    sides = {"A": torch.zeros(4, 128), "B": torch.zeros(128, 4)}
    save_file({f"{stem}_{side}.weight": value for side, value in sides.items()}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_names_its_base(tiny_model: Path, other: Path, tmp_path: Path) -> None:
    assert base_of(adapter_on(tiny_model, tmp_path / "a"), [other]) == tiny_model
    assert base_of(adapter_on("someone/model", tmp_path / "b"), [other, tiny_model]) == other
    assert base_of(adapter_on(tmp_path / "gone", tmp_path / "c"), [other, tiny_model]) == other


def test_the_digest_of_the_manifest_decides(tiny_model: Path, other: Path, tmp_path: Path) -> None:
    adapter = adapter_on(tmp_path / "gone", tmp_path / "adapter")
    manifest = {"base_model": str(tiny_model), "base_digest": digest_weights(tiny_model), "request": {}}
    write_sealed_json(adapter / "manifest.json", manifest)
    assert base_of(adapter, [other]) == tiny_model
    write_sealed_json(adapter / "manifest.json", manifest | {"base_model": str(tmp_path / "gone")})
    assert base_of(adapter, [other, tiny_model]) == tiny_model
    with pytest.raises(WeightMismatchError, match=r"none of .*other.* holds them: load these full weights first"):
        base_of(adapter, [other])


def test_an_adapter_without_a_readable_configuration_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    adapter = adapter_on(tiny_model, tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(WeightMismatchError, match=r"adapter_config\.json .*cannot be read"):
        base_of(adapter, [tiny_model])


def test_vllm_loads_an_adapter_on_its_base(tiny_model: Path, other: Path, tmp_path: Path) -> None:
    weights = ServedWeights(None, tiny_model, max_lora_rank=8)
    weights.served = Weights(1, "", other, other)
    change = weights.prepare(adapter_on(tiny_model, tmp_path / "adapter"), 2)
    assert (change.base, change.adapter) == (tiny_model, tmp_path / "adapter")
