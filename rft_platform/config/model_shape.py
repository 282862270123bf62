"""The sizes of a model, as its folder gives them."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rft_platform.algorithms.spec import LoraSpec
from rft_platform.common.digests import weight_files


def model_folder(model: str) -> Path | None:
    """The folder of a local model, or of a Hugging Face model whose configuration is in the cache; None: unknown."""
    if Path(model).is_dir() or model.startswith("models:/"):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, as its folder gives them."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    queries: int  # heads * head size
    keys: int  # key-value heads * head size
    vocabulary: int

    @classmethod
    def of(cls, model: str) -> "ModelShape | None":
        """The shape of a local model, or of a Hugging Face model whose configuration is in the cache; None: unknown."""
        folder = model_folder(model)
        return None if folder is None else cls.read(folder)

    @classmethod
    def read(cls, folder: Path) -> "ModelShape | None":
        """The shape of the model in ``folder``; None if it has no readable configuration.

        Without weights, as when only the configuration was fetched, the parameters are computed from the sizes.
        """
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            size = config.get("head_dim") or hidden // heads
            experts = config.get("num_experts_per_tok") or 0
            shape = cls(
                parameters=sum(map(_parameters, weight_files(folder))),
                layers=config["num_hidden_layers"],
                hidden=hidden,
                intermediate=experts * config.get("moe_intermediate_size", 0) or config["intermediate_size"],
                queries=heads * size,
                keys=(config.get("num_key_value_heads") or heads) * size,
                vocabulary=config["vocab_size"],
            )
            if shape.parameters or experts:
                return shape if shape.parameters else None
            embeddings = 1 if config.get("tie_word_embeddings") else 2
            layer = shape.hidden * (2 * shape.queries + 2 * shape.keys + 3 * shape.intermediate)
            return replace(shape, parameters=embeddings * shape.vocabulary * hidden + shape.layers * layer)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, the largest tensor of a model."""
        return self.vocabulary * self.hidden

    def adapted(self, lora: LoraSpec) -> dict[str, int]:
        """The linear layers of a decoder layer that get an adapter, each with the sum of its inputs and outputs.

        All of them, unless ``target_modules`` lists names of them.
        """
        hidden, wide = self.hidden, self.intermediate
        sizes = dict.fromkeys(("q_proj", "o_proj"), hidden + self.queries)
        sizes |= dict.fromkeys(("k_proj", "v_proj"), hidden + self.keys)
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + wide)
        listed = () if isinstance(lora.target_modules, str) else lora.target_modules
        names = {name.rpartition(".")[2] for name in listed}
        return {name: size for name, size in sizes.items() if name in names} or sizes

    def adapter(self, lora: LoraSpec) -> int:
        """Parameters of an adapter."""
        return self.layers * lora.rank * sum(self.adapted(lora).values())


def _parameters(file: Path) -> int:
    """Number of values in a safetensors file, from its header: its length in 8 bytes, then JSON."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        count = 1
        for size in tensor["shape"]:
            count *= size
        total += count
    return total
