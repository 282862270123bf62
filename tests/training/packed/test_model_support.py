"""Models whose rows would leak into each other in a pack are refused; the others are exact in it."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    JetMoeConfig,
    JetMoeForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from rft_platform.common.errors import UserError
from rft_platform.training.data.samples import Sample
from rft_platform.training.models.critic import PackedCritic
from rft_platform.training.packed.packed_policy import PackedPolicy, score

SMALL: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "factor": 4.0, "original_max_position_embeddings": 8,
}  # fmt: skip


def llama(kind: Any = LlamaForCausalLM, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(LlamaConfig(**(SMALL | settings))).eval()


def leak(policy: PackedPolicy) -> float:
    """Largest difference of log-probs between rows of one pack and rows alone; one row is four times as long."""
    rng = np.random.default_rng(0)
    rows = [Sample(str(n), rng.integers(0, 23, n).astype(np.int32), np.arange(n) > 0) for n in (6, 30, 7)]
    together = score(policy, rows, max_tokens_per_pack=1000)
    alone = [score(policy, [row], max_tokens_per_pack=1000)[0] for row in rows]
    return max(float(np.abs(one - other).max()) for one, other in zip(together, alone, strict=True))


def lfm2() -> Any:
    return Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]))


def qwen() -> Any:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SMALL, layer_types=["linear_attention", "full_attention"]))


def jetmoe() -> Any:
    return JetMoeForCausalLM(JetMoeConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, kv_channels=8))


@pytest.mark.parametrize(
    ("make", "found"),
    [(lfm2, "layers of type conv:"), (qwen, "layers of type linear_attention:"), (jetmoe, "without self_attn")],
)
def test_layers_that_are_not_attention_are_refused(make: Any, found: str) -> None:
    with pytest.raises(UserError, match=f"ForCausalLM has .*{found}"):
        PackedPolicy(make())


@pytest.mark.parametrize(
    ("rope", "longest", "fix"), [(DYNAMIC, 8, "set rope_type default"), (LONGROPE, 32, "set max_position_embeddings 8")]
)
def test_frequencies_that_follow_the_longest_row_are_refused(rope: dict[str, Any], longest: int, fix: str) -> None:
    for packed, kind in ((PackedPolicy, LlamaForCausalLM), (PackedCritic, LlamaForTokenClassification)):
        with pytest.raises(UserError, match=rf"rope_type {rope['rope_type']} .* beyond 8 tokens .* {fix}"):
            packed(llama(kind, max_position_embeddings=longest, rope_parameters=dict(rope)))


def test_the_critic_refuses_other_layers_too() -> None:
    model = llama(LlamaForTokenClassification)
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match="LlamaForTokenClassification has layers of type linear_attention"):
        PackedCritic(model)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8},
        DYNAMIC | {"factor": 1.0},
        LONGROPE | {"original_max_position_embeddings": 32},
    ],
)
def test_frequencies_of_their_own_are_exact_in_a_pack(rope: dict[str, Any]) -> None:
    assert leak(PackedPolicy(llama(max_position_embeddings=32, rope_parameters=rope))) < 1e-5


def test_the_limit_of_phis_longrope_is_read_from_the_model_configuration() -> None:
    rope = {name: value for name, value in LONGROPE.items() if name != "original_max_position_embeddings"}
    config = Phi3Config(
        **SMALL, max_position_embeddings=32, original_max_position_embeddings=8, rope_parameters=rope,
    )  # fmt: skip
    with pytest.raises(UserError, match="beyond 8 tokens"):
        PackedPolicy(Phi3ForCausalLM(config))
