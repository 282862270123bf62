"""A model with random weights and the shape of a Qwen3 model: 0.6, 4 or 8 billion parameters.

``python benchmarks/shape_model.py FOLDER [SHAPE]`` writes it, with the tiny model's tokenizer. Every id decodes to
text that encodes to this id.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rft_platform.common.files import atomic_path, read_json
from rft_platform.recipes.tiny_model import build_tokenizer

VOCABULARY = 151936
CONTEXT = 16_384
WORD = r"w\d{6}"  # the text of an id that the tiny model's tokenizer lacks
_COMMON = {"vocab_size": VOCABULARY, "num_key_value_heads": 8, "head_dim": 128}

#: The Qwen3 models of these sizes: https://arxiv.org/abs/2505.09388, table 1.
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": _COMMON
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True},
    "4b": _COMMON
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": True},
    "8b": _COMMON
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
}


def build_shape_model(folder: Path, shape: str = "0.6b", dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write the Hugging Face folder in files of up to 2 GB, unless it is there, and return it."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

    if (folder / "config.json").exists():
        return folder
    tokenizer = build_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = SHAPES[shape]
    config = Qwen3Config(max_position_embeddings=CONTEXT, bos_token_id=None, dtype=dtype, **ends, **sizes)
    with atomic_path(folder) as temp:
        tokenizer.save_pretrained(temp)
        fill_vocabulary(temp / "tokenizer.json", VOCABULARY)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.generation_config = GenerationConfig(do_sample=True, **ends)
        model.save_pretrained(temp, max_shard_size="2GB")
    return folder


def fill_vocabulary(file: Path, size: int) -> None:
    """Give every id up to ``size`` a text of its own that encodes to this id, between any others.

    So the history of a conversation encodes to the ids that were sampled. The words are part of the BPE vocabulary and
    are looked up as a whole (``ignore_merges``): as added tokens, 150,000 of them would take seconds to load.
    """
    tokenizer = read_json(file)
    model, split = tokenizer["model"], tokenizer["pre_tokenizer"]["pretokenizers"][0]
    model["vocab"] |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}  # else they get other ids
    words = set(range(size)) - set(model["vocab"].values())
    model["vocab"] |= {f"w{number:06d}": number for number in sorted(words)}
    model["ignore_merges"] = True
    word = {**split, "pattern": {"Regex": WORD}}
    split["pattern"]["Regex"] = f"{WORD}|{split['pattern']['Regex']}"
    tokenizer["pre_tokenizer"]["pretokenizers"].insert(0, word)
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", nargs="?", choices=list(SHAPES), default="0.6b")
    given = parser.parse_args()
    print(build_shape_model(given.folder, given.shape))
