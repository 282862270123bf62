"""Every model family: a pack's log-probs equal those of a plain forward, or the model is refused before it runs."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from rft_platform.algorithms.spec import LoraSpec
from rft_platform.common.errors import UserError
from rft_platform.training.data.samples import Sample
from rft_platform.training.packed.model_check import check_trainable
from rft_platform.training.packed.model_support import OWN_ATTENTION, WINDOW_IN_MASK, check_window
from rft_platform.training.packed.packed_policy import PackedPolicy, score

CONTEXT = 64
SMALL: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "max_window_layers": 2,
    "initializer_range": 0.2, "max_position_embeddings": CONTEXT,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 6, "use_sliding_window": True}
SLIDING = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
WIDE = SLIDING | {"sliding_window": CONTEXT}
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}

EXACT: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}), ("mistral", {"sliding_window": None}), ("mistral", {"sliding_window": CONTEXT}),
    ("mixtral", {"sliding_window": None}), ("qwen2", {}), ("qwen2", WIDE), ("qwen2_moe", {}), ("qwen2_moe", WIDE),
    ("qwen3", {}), ("qwen3_moe", {}), ("gemma", {}), ("gemma2", UNCAPPED | {"sliding_window": CONTEXT}),
    ("gemma3_text", WIDE), ("phi", {}), ("phi3", {"sliding_window": None}), ("phimoe", {"sliding_window": None}),
    ("phimoe", {"sliding_window": CONTEXT}), ("olmo2", {}), ("olmo3", WIDE), ("olmoe", {}), ("granite", {}),
    ("starcoder2", {"sliding_window": None}), ("smollm3", {}), ("glm4", {}), ("ernie4_5", {}), ("exaone4", WIDE),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_oss", {}, "GptOssForCausalLM cannot be trained: its attention has sinks"),
    ("granite_swa", {}, "GraniteSWAForCausalLM cannot be trained: its attention has sinks"),
    ("gemma2", UNCAPPED | {"attn_logit_softcapping": 50.0}, r"soft-capped \(attn_logit_softcapping 50.0\)"),
    ("vaultgemma", UNCAPPED | {"attn_logit_softcapping": 50.0}, "soft-capped"),
    ("gemma2", {"attn_logit_softcapping": None}, "final_logit_softcapping"),
    ("qwen2_moe", SLIDING, "Qwen2MoeForCausalLM cannot be trained: its sliding_window 6 is shorter than .* 64"),
    ("phimoe", WINDOW, "PhimoeForCausalLM cannot be trained: its sliding_window 6 is shorter than .* 64"),
    ("doge", {}, "DogeForCausalLM cannot be trained: its attention computes its own mask"),
    ("stablelm", {}, "lacks the interface"),
    ("nemotron", {}, "lacks the interface"),
    ("moshi", {}, "lacks the interface"),
]
WINDOWED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", WINDOW), ("mixtral", WINDOW), ("qwen2", SLIDING), ("qwen3", SLIDING), ("qwen3_moe", WINDOW),
    ("phi3", WINDOW), ("starcoder2", WINDOW), ("gemma2", UNCAPPED | SLIDING), ("gemma3_text", SLIDING),
    ("olmo3", SLIDING), ("exaone4", SLIDING), ("smollm3", SLIDING), ("ministral", SLIDING), ("cwm", SLIDING),
]  # fmt: skip


def config_of(family: str, settings: dict[str, Any]) -> Any:
    kind = type(AutoConfig.for_model(family))
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", ())}
    return kind(**{name: value for name, value in (SMALL | settings).items() if name in known})


def model_of(family: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family, settings), dtype=torch.float32).eval()


def rows() -> list[Sample]:
    """Two rows that share a prefix, and others of different lengths."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, 23, n).astype(np.int32) for n in (7, 31, 12, 20)]
    tokens[2][:6] = tokens[0][:6]
    return [Sample(str(n), ids, np.arange(len(ids)) > 0) for n, ids in enumerate(tokens)]


def plain_logprobs(model: Any, sample: Sample) -> np.ndarray:
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0].float()
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()


@pytest.mark.parametrize(("family", "settings"), EXACT, ids=lambda value: value if isinstance(value, str) else "")
def test_a_pack_equals_plain_forwards(family: str, settings: dict[str, Any]) -> None:
    model, samples = model_of(family, settings), rows()
    plain = [plain_logprobs(model, sample) for sample in samples]
    packed = score(PackedPolicy(model), samples, max_tokens_per_pack=1000)
    for one, other in zip(packed, plain, strict=True):
        np.testing.assert_allclose(one[-len(other) :], other, atol=2e-5)
    check_window(model, None)


@pytest.mark.parametrize(
    ("family", "settings", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_packs_do_not_compute_is_refused_before_any_weight_is_read(
    family: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config_of(family, settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        check_trainable(tmp_path, 16)
    with pytest.raises(UserError, match=message):
        PackedPolicy(model_of(family, settings))


@pytest.mark.parametrize(("family", "settings"), WINDOWED, ids=lambda value: value if isinstance(value, str) else "")
def test_rows_that_outgrow_a_sliding_window_are_refused_by_the_check(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config_of(family, settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"ForCausalLM has sliding_window 6 .* 64 tokens.*max_model_len to 6 or less"):
        check_trainable(tmp_path, None)
    with pytest.raises(UserError, match="rows can have 7 tokens"):
        check_trainable(tmp_path, 7)
    check_trainable(tmp_path, 6)


@pytest.mark.slow
def test_every_model_of_transformers_whose_window_is_in_the_mask_alone_is_known() -> None:
    """A new version of transformers may bring others, which would ignore their window in silence."""
    models = Path(transformers.__file__).parent / "models"
    mask_only = set()
    for file in models.glob("*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        if "create_sliding_window_causal_mask(" in text or "else create_sliding_window_causal_mask" in text:
            passes = any(
                keyword.arg == "sliding_window"
                for call in ast.walk(ast.parse(text))
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "attention_interface"
                for keyword in call.keywords
            )
            if not passes and re.search(r"class \w+ForCausalLM", text):
                mask_only.add(file.parent.name)
    assert mask_only - WINDOW_IN_MASK - set(OWN_ATTENTION) == set()
    assert mask_only >= WINDOW_IN_MASK


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            LoraSpec(4, 8, ("nope", "norm")),
            r"target_modules \('nope', 'norm'\) of model.lora_configs: no layer of .* names",
        ),
        (LoraSpec(4, 8, "q_proj"), "target_modules 'q_proj' of model.lora_configs: no layer of .* matches; give"),
        (
            LoraSpec(4, 8, "(("),
            r"target_modules '\(\(' of model.lora_configs: no regular expression of Python: missing",
        ),
        (LoraSpec(1_000_000), "lora_rank 1,000,000 of model.lora_configs: the matrices of .* have at most rank"),
    ],
)
def test_an_adapter_that_the_model_cannot_have_is_refused(tiny_model: Path, lora: LoraSpec, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_trainable(tiny_model, CONTEXT, lora)


def test_an_adapter_of_fused_experts_is_accepted(tmp_path: Path) -> None:
    """peft adapts them by the names of the layers that they were before they were fused."""
    config_of("qwen3_moe", {}).save_pretrained(tmp_path)
    check_trainable(tmp_path, CONTEXT, LoraSpec(4, 8, ("gate_proj", "up_proj", "down_proj")))


@pytest.mark.parametrize("modules", ["all-linear", r".*\.[qv]_proj", ("q_proj", "nope"), ("self_attn.v_proj",)])
def test_an_adapter_of_some_layers_is_accepted(tiny_model: Path, modules: str | tuple[str, ...]) -> None:
    check_trainable(tiny_model, CONTEXT, LoraSpec(4, 8, modules))
