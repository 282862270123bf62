"""A random Qwen3 model that computes in a millisecond."""

from typing import Any

import torch

VOCABULARY = 23


def build_model(
    *, tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0, head_dim: int = 8, **settings: Any
) -> Any:
    """Two layers of grouped-query attention, weights large enough that attention to a wrong token shows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=48,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        **settings,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).to(dtype)
