"""A random-weight model of a real one's shape: 0.6 billion parameters, with the tiny model's tokenizer made as large.

``python benchmarks/shape_model.py FOLDER`` writes it. Every id decodes to text, as a trained model's vocabulary does.
"""

import argparse
import json
from pathlib import Path

from rft_platform.common.files import atomic_path, read_json
from rft_platform.recipes.arithmetic.model import CONTEXT, build_tokenizer

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def build_shape_model(folder: Path, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write the Hugging Face folder, unless it is there, and return it."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    if (folder / "model.safetensors").exists():
        return folder
    tokenizer = build_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None, dtype=dtype, **ends, **SHAPE
    )
    with atomic_path(folder) as temp:
        tokenizer.save_pretrained(temp)
        fill_vocabulary(temp / "tokenizer.json", SHAPE["vocab_size"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
        save_file(weights, temp / "model.safetensors", metadata={"format": "pt"})
        config.architectures = [type(model).__name__]
        config.save_pretrained(temp)
        GenerationConfig(do_sample=True, **ends).save_pretrained(temp)
    return folder


def fill_vocabulary(file: Path, size: int) -> None:
    """Give every id up to ``size`` a text of its own that no merge makes: encoding stays as it was."""
    tokenizer = read_json(file)
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary.update({f"w{number:06d}": number for number in range(size) if number not in taken})
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(build_shape_model(parser.parse_args().folder))
