"""Initial weights with which a tiny model copies from its context.

Pretrained models continue a text that repeats as it went on before: a head of one layer marks each token with the one
before it, and a head of a later layer attends to the token after an earlier occurrence of the current one (an induction
head: Elhage et al., A Mathematical Framework for Transformer Circuits, 2021; Olsson et al., In-context Learning and
Induction Heads, 2022). A model that reads lists and calls tools needs such heads, and a tiny one that starts at random
does not find them in minutes. Here they are written into the weights; everything else is learned.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rft_platform.common.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3ForCausalLM

ROPE_THETA = 1e6  # its lowest frequencies hardly turn within a conversation: matching does not depend on the distance
CONSTANT = 0.25  # share of a constant in the squared norm of each embedding
ALIKE = 0.4  # noise between the embeddings of a word with and without its leading space
FAST, SLOW = 6, 10  # pairs of a head's dimensions that find the token before, and that match tokens
SHARPNESS = 2.6  # of the attention in those pairs
MARK, INDUCTION, COPY, REST = 0.15, 0.5, 0.3, 0.01  # scales of what heads and MLPs write at first


def add_copying_heads(model: "Qwen3ForCausalLM", vocabulary: Mapping[str, int]) -> None:
    """Rewrite the random weights of a model with at least two layers in place; ``vocabulary`` maps tokens to ids.

    The residual stream (width D, heads of d dimensions) is divided: D - d - 1 dimensions for the token itself, one for
    a constant, d for the token before it. The first head of layer 0 writes the latter. In later layers the values of
    all heads are the token itself, which they write back; in layer 1 the first head of each group of queries attends by
    induction. The outputs of MLPs and of the other heads of layer 0 start near zero.

    Raises ``UserError`` if the values of a layer's heads have more dimensions than the token.
    """
    import torch

    values, width = model.config.num_key_value_heads * model.config.head_dim, _width_of_tokens(model)
    if values > width:
        raise UserError(
            f"copies: the key-value heads of a layer have {values} dimensions, more than the {width} of a token; use a "
            "size with fewer or smaller heads"
        )
    with torch.no_grad():
        _divide_embeddings(model, vocabulary)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(REST)
            layer.mlp.down_proj.weight.mul_(REST)
        token_before = _mark_with_the_token_before(model)
        for number in range(1, len(model.model.layers)):
            _copy(model, number)
        _attend_by_induction(model, token_before)


def _width_of_tokens(model: "Qwen3ForCausalLM") -> int:
    return int(model.config.hidden_size - model.config.head_dim - 1)


def _divide_embeddings(model: "Qwen3ForCausalLM", vocabulary: Mapping[str, int]) -> None:
    """Unit embeddings: a word with a leading space is like the one without; one dimension is constant."""
    embeddings, width = model.model.embed_tokens.weight, _width_of_tokens(model)
    tokens = embeddings[:, :width]
    for text, number in vocabulary.items():
        if text.startswith("Ġ") and text[1:] in vocabulary:
            tokens[number] = tokens[vocabulary[text[1:]]] + ALIKE * tokens[number]
    tokens /= tokens.norm(dim=1, keepdim=True).clamp_min(1e-6)
    tokens *= (1 - CONSTANT) ** 0.5
    embeddings[:, width] = CONSTANT**0.5
    embeddings[:, width + 1 :] = 0


def _mark_with_the_token_before(model: "Qwen3ForCausalLM") -> "torch.Tensor":
    """Let head 0 of layer 0 attend one place back; returns its projection of tokens, (d, width of tokens).

    Query and key read the constant. The key is turned ahead by one place: with rotary positions the score of a key n
    places back is the sum of cos(f (n - 1)) over the frequencies f.
    """
    import torch

    attention, size, width = model.model.layers[0].self_attn, model.config.head_dim, _width_of_tokens(model)
    pairs = torch.arange(FAST)
    angles = ROPE_THETA ** (-2 * pairs / size)
    query, key = attention.q_proj.weight[:size], attention.k_proj.weight[:size]
    query.zero_()
    key.zero_()
    query[pairs, width] = 1
    key[pairs, width], key[pairs + size // 2, width] = torch.cos(angles), torch.sin(angles)
    _sharpen(attention, pairs, size)
    projection = _orthonormal(size, width)
    attention.v_proj.weight[:size] = 0
    attention.v_proj.weight[:size, :width] = projection
    attention.o_proj.weight[:, :size] = 0
    attention.o_proj.weight[width + 1 :, :size] = MARK * torch.eye(size)
    return projection


def _copy(model: "Qwen3ForCausalLM", number: int) -> None:
    """Let all heads of a layer write the token to which they attend."""
    attention, size, width = model.model.layers[number].self_attn, model.config.head_dim, _width_of_tokens(model)
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    values = _orthonormal(groups * size, width)
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:, :width] = values
    attention.o_proj.weight.zero_()
    for head in range(heads):
        group, place = divmod(head, heads // groups)
        scale = INDUCTION if number == 1 and place == 0 else COPY
        attention.o_proj.weight[:width, head * size : (head + 1) * size] = (
            scale * values[group * size : (group + 1) * size].T
        )


def _attend_by_induction(model: "Qwen3ForCausalLM", token_before: "torch.Tensor") -> None:
    """Layer 1: the query is the current token, the key is the mark with the token before."""
    import torch

    attention, size, width = model.model.layers[1].self_attn, model.config.head_dim, _width_of_tokens(model)
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    pairs = torch.arange(size // 2 - SLOW, size // 2)
    rows = torch.cat([pairs, pairs + size // 2])
    matched = _orthonormal(2 * SLOW, size)
    for group in range(groups):
        head = group * (heads // groups)
        query = attention.q_proj.weight[head * size : (head + 1) * size]
        key = attention.k_proj.weight[group * size : (group + 1) * size]
        query.zero_()
        key.zero_()
        query[rows, :width] = matched @ token_before
        key[rows, width + 1 :] = matched
    _sharpen(attention, pairs, size)


def _sharpen(attention: "torch.nn.Module", pairs: "torch.Tensor", size: int) -> None:
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight[pairs], norm.weight[pairs + size // 2] = SHARPNESS, SHARPNESS


def _orthonormal(rows: int, columns: int) -> "torch.Tensor":
    import torch

    return torch.linalg.qr(torch.randn(columns, rows))[0].T
