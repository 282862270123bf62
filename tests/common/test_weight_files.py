"""Which files of a model folder hold its weights."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rft_platform.common.digests import digest_weights, weight_files
from rft_platform.config.model_shape import ModelShape
from rft_platform.inference.serving.weight_files import check_folder, layout_of


@pytest.fixture
def mistral(tiny_model: Path, tmp_path: Path) -> Path:
    """A model in two files with an index, beside the same weights under other names."""
    folder = shutil.copytree(tiny_model, tmp_path / "mistral")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, folder / "consolidated.safetensors")
    return folder


def test_the_index_names_the_weight_files(mistral: Path, tiny_model: Path) -> None:
    assert [file.name[:11] for file in weight_files(mistral)] == ["model-00001", "model-00002"]
    check_folder(layout_of(mistral), tiny_model)  # a trained checkpoint fits the model it started from
    shape, alone = ModelShape.read(mistral), ModelShape.read(tiny_model)
    assert shape is not None and alone is not None and shape.parameters == alone.parameters
    digest = digest_weights(mistral)
    (mistral / "consolidated.safetensors").unlink()
    assert digest_weights(mistral) == digest


def test_without_an_index_the_usual_file_or_every_file_counts(mistral: Path) -> None:
    (mistral / "model.safetensors.index.json").write_text("broken")
    assert len(weight_files(mistral)) == 3
    shutil.copy(mistral / "consolidated.safetensors", mistral / "model.safetensors")
    assert [file.name for file in weight_files(mistral)] == ["model.safetensors"]
    (mistral / "adapter_config.json").write_text("{}")
    shutil.copy(mistral / "consolidated.safetensors", mistral / "adapter_model.safetensors")
    assert [file.name for file in weight_files(mistral)] == ["adapter_model.safetensors"]
