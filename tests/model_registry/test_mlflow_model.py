"""MLflow loads registered checkpoints in place, full weights and adapters, as a pipeline and as a pyfunc model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.digests import checkpoint_damage
from rft_platform.common.files import write_sealed_json
from rft_platform.model_registry.mlflow_model import MLMODEL, describe_checkpoint
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.model_registry.sqlite_reader import read_versions
from rft_platform.rounds.maintenance.checkpoint_retention import _thin
from rft_platform.training.checkpoint.manifest import describe_files

PROMPT = [{"role": "user", "content": "12+30=?"}]
#: Prints, for each address: the class of the model, the answer of the pipeline, and the answer of the pyfunc model.
LOAD = f"""
import json, sys, mlflow
for address in sys.argv[1:]:
    pipeline = mlflow.transformers.load_model(address)
    (answer,) = pipeline({PROMPT!r}, max_new_tokens=8, do_sample=False)
    loaded = mlflow.pyfunc.load_model(address)
    (completion,) = loaded.predict({{"messages": {PROMPT!r}, "max_tokens": 8}})
    message = answer["generated_text"][-1]["content"]
    print(json.dumps([type(pipeline.model).__name__, message, completion]))
"""


def seal(folder: Path, **entries: Any) -> None:
    """Write the manifest of a checkpoint."""
    write_sealed_json(folder / "manifest.json", {**entries, "files": describe_files(folder)})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "project" / ".rft"
    (home / "rounds").mkdir(parents=True)
    return home


@pytest.fixture
def checkpoint(home: Path, tiny_model: Path) -> Path:
    """A checkpoint with full weights."""
    folder = home / "checkpoints" / "shop" / "helper" / "global_step_4"
    shutil.copytree(tiny_model, folder)
    seal(folder)
    return folder


def add_adapter(checkpoint: Path) -> Path:
    """A checkpoint with an adapter of random weights over those of ``checkpoint``."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = checkpoint.with_name("global_step_8")
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), settings).save_pretrained(folder)
    for file in [*checkpoint.glob("tokenizer*"), checkpoint / "chat_template.jinja"]:
        shutil.copy(file, folder)
    seal(folder, base_model=str(checkpoint), request={"output": str(folder)})
    return folder


def answer_of(folder: Path, base: Path | None = None) -> str:
    """What transformers and peft answer without MLflow."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(base or folder)
    model = model if base is None else PeftModel.from_pretrained(model, str(folder))
    inputs = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.slow
def test_only_the_tracking_uri_is_needed_to_load_the_versions_of_a_moved_home(
    home: Path, checkpoint: Path, tmp_path: Path
) -> None:
    adapter = add_adapter(checkpoint)
    registry = ModelRegistry(f"sqlite:///{home}/mlflow/mlflow.db", home / "mlflow" / "artifacts", "shop", "helper")
    registry.promote(registry.register_checkpoint(checkpoint, 4, {"weights_digest": "a" * 64}))
    registry.register_checkpoint(adapter, 8, {"weights_digest": "b" * 64})
    (tmp_path / "project").rename(tmp_path / "moved")
    moved, elsewhere = tmp_path / "moved" / ".rft", tmp_path / "elsewhere"
    elsewhere.mkdir()
    uri = f"sqlite:///{moved}/mlflow/mlflow.db"
    assert read_versions(uri, "helper"), "the first command in the moved home corrects the locations"

    environment = os.environ | {"MLFLOW_TRACKING_URI": uri, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, "models:/helper@champion", "models:/helper@candidate"]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    full, lora = (json.loads(line) for line in done.stdout.splitlines())
    folders = moved / "checkpoints" / "shop" / "helper"
    assert full[:2] == ["Qwen3ForCausalLM", answer_of(folders / "global_step_4")]
    assert lora[:2] == ["PeftModelForCausalLM", answer_of(folders / "global_step_8", folders / "global_step_4")]
    assert full[1] != lora[1]
    for _, _, completion in (full, lora):
        assert completion["choices"][0]["message"]["role"] == "assistant"
        assert completion["usage"]["completion_tokens"] > 0
    for folder in folders.iterdir():
        assert checkpoint_damage(folder) is None, "MLflow's files are not part of what the manifest seals"


def test_a_description_copies_no_file_and_changes_none(checkpoint: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()}
    assert describe_checkpoint(checkpoint)
    tokenizer = checkpoint / "components" / "tokenizer"
    assert (tokenizer / "tokenizer.json").samefile(checkpoint / "tokenizer.json")
    assert list((checkpoint / "components").rglob("*.safetensors")) == []
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert checkpoint_damage(checkpoint) is None
    described = (checkpoint / MLMODEL).read_text()
    assert str(checkpoint) not in described, "it holds wherever the folder is"
    assert describe_checkpoint(checkpoint) and (checkpoint / MLMODEL).read_text() == described


def test_an_interrupted_description_is_completed(checkpoint: Path) -> None:
    describe_checkpoint(checkpoint)
    (checkpoint / MLMODEL).unlink()
    (checkpoint / "components" / "tokenizer" / "tokenizer.json").unlink()
    assert describe_checkpoint(checkpoint)
    assert (checkpoint / MLMODEL).exists() and (checkpoint / "components" / "tokenizer" / "tokenizer.json").exists()


def test_a_description_is_removed_with_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    describe_checkpoint(checkpoint)
    assert _thin(checkpoint, tmp_path / "project" / "discarded", [])
    assert {file.name for file in checkpoint.iterdir()} == {"manifest.json", "thinned.json"}
    assert not describe_checkpoint(checkpoint), "a version without weights has nothing to load"


def test_an_adapter_over_weights_outside_the_home_names_their_folder(home: Path, tiny_model: Path) -> None:
    folder = home / "checkpoints" / "shop" / "helper" / "global_step_8"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    seal(folder, base_model=str(tiny_model), request={"output": str(folder)})
    assert describe_checkpoint(folder)
    assert f"model_binary: {tiny_model}\n" in (folder / MLMODEL).read_text()
