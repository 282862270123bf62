"""A model folder that brings code of its own is refused, and nobody is asked whether to run it."""

import json
import shutil
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.openai_api.tokenizer import PolicyTokenizer

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def test_a_tokenizer_with_code_is_refused_without_a_question(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr("builtins.input", ask)
    folder = shutil.copytree(tiny_model, tmp_path / "foreign")
    (folder / "tokenization_own.py").write_text(CODE)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "OwnTokenizer"
    config["auto_map"] = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        PolicyTokenizer(folder)  # transformers may know a tokenizer for this model type: then the code is left alone
    except UserError as error:
        assert "tokenizer" in str(error)
    assert not list(tmp_path.rglob("ran"))


def test_a_model_with_code_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    import torch

    from rft_platform.inference.transformers_engine.model import PolicyModel

    folder = shutil.copytree(tiny_model, tmp_path / "foreign")
    (folder / "modeling_own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="weights cannot be loaded"):
        PolicyModel(folder, torch.float32, torch.device("cpu"))
    assert not list(tmp_path.rglob("ran"))
