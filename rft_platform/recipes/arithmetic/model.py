"""A tiny Qwen3-architecture model with a byte-level BPE tokenizer, made from code: nothing is downloaded.

The weights are random, so the folder is a starting point for a warm start, not a policy.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.errors import UserError
from rft_platform.files import atomic_path, digest_json, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCABULARY = 512
CONTEXT = 4096
BUILD = 1  # raise it when other code below makes another model
BUILD_FILE = "build.json"

# What the vocabulary is learned from: roles, the template's own words, JSON of tool calls and plain questions.
ROLES = "system user assistant tool"
CORPUS = (
    'Tools, one JSON schema a line:\nTo use one, answer with\n{"name": NAME, "arguments": {...}}',
    '{"type": "function", "function": {"name": "calculator", "description": "Evaluate an arithmetic expression",',
    '"parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}',
    "What is the sum of these numbers? How many are there in all? The answer is the number after the equals sign.",
    "You are a helpful assistant. Solve the problem step by step and give the final answer at the end.",
)


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen3 model."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int


SHAPES = {
    "1m": Shape(128, 5, 4, 2, 32, 384),
    "10m": Shape(320, 8, 5, 5, 64, 960),
}


def build_model(folder: Path, seed: int = 0, size: str = "1m", corpus: Sequence[str] = CORPUS) -> Path:
    """Write the Hugging Face folder (safetensors, generation config, tokenizer, chat template) and return it.

    ``corpus`` is what the vocabulary is learned from. Equal arguments give equal bytes. A folder that already holds
    this model is left alone; ``UserError`` for an unknown size.
    """
    if size not in SHAPES:
        raise UserError(f"model size {size!r}: expected one of {', '.join(SHAPES)}")
    digest = digest_json([BUILD, asdict(SHAPES[size]), seed, VOCABULARY, CONTEXT, ROLES, corpus, _template()])
    stamp = folder / BUILD_FILE
    if stamp.exists() and read_json(stamp)["digest"] == digest:
        return folder
    with atomic_path(folder) as temp:
        tokenizer = build_tokenizer(corpus)
        tokenizer.save_pretrained(temp)
        _write_weights(temp, tokenizer, SHAPES[size], seed)
        write_json(temp / BUILD_FILE, {"digest": digest, "size": size, "seed": seed})
    return folder


def build_tokenizer(corpus: Sequence[str] = CORPUS) -> "PreTrainedTokenizerFast":
    """A byte-level BPE of 512 tokens: every digit is one token, turns end with ``<|im_end|>``."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    words = Regex(r"\d|\n| ?\p{L}+| ?[^\s\p{L}\d]+|\s+")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A pair is merged if it is seen twice; the roles come first because every turn pays for them.
    bpe.train_from_iterator([ROLES.replace(" ", "\n")] * 8 + list(corpus) * 2, trainer)
    # Tags are one token each but ordinary text: they survive decoding, so that tool calls can be parsed.
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _template()
    return tokenizer


def _template() -> str:
    return Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def _write_weights(folder: Path, tokenizer: "PreTrainedTokenizerFast", shape: Shape, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        # 1/sqrt(width) keeps activations at unit scale; the usual 0.02 suits models ten times as wide and more,
        # and makes one this narrow learn at a step that depends on the seed.
        initializer_range=shape.hidden_size**-0.5,
        dtype="float32",
        **asdict(shape),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    ).save_pretrained(folder)
