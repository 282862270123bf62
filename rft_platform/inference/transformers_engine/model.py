"""The policy model of the engine: forward prompts, forward one more token per row, and score whole sequences.

A row is one sequence of a batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rft_platform.common.errors import UserError, WeightMismatchError
from rft_platform.inference.transformers_engine.attention import (
    ATTENTION_NAME,
    AttentionPass,
    PromptPass,
    SlotCache,
    TokenPass,
    slot_attention,
)

PADDING_WASTE = 0.25  # largest number of padding tokens in a batch of prompts, as a share of its real tokens
PROMPT_TOKENS = 16_384  # most tokens in one forward pass of prompts
HEAD_LOGITS = 2**25  # logits computed in one piece (128 MiB in float32)
CHECK_TOKENS = 8
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}  # mean |delta log-prob|


@dataclass(slots=True)
class PromptBatch:
    """A batch of prompts after its forward pass; ``indices``: each row's index in the caller's list."""

    indices: list[int]
    last_hidden: torch.Tensor  # [rows, hidden]: hidden state at each prompt's last token
    prompt_pass: PromptPass


class PolicyModel:
    """A decoder-only language model on one device."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(ATTENTION_NAME, slot_attention)
        try:
            self.module: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UserError(f"model folder {folder}: the weights cannot be loaded: {error}") from error
        self.module.to(device).eval()
        self.device, self.dtype = device, dtype
        config = self.module.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.max_positions = _max_positions(config)
        self.cache_bytes_per_token = _cache_bytes_per_token(config, dtype)
        self._use_slot_attention(folder)

    @property
    def rows_a_piece(self) -> int:
        """Number of rows that go through the output head at once; it bounds the logits [rows, vocabulary]."""
        return max(1, HEAD_LOGITS // self.vocabulary)

    def read_prompts(self, prompts: Sequence[list[int]], keep: bool = True) -> Iterator[PromptBatch]:
        """Forward every prompt once, in batches of similar length; ``keep``: keep keys and values for a cache."""
        for indices in plan_batches([len(p) for p in prompts]):
            with torch.inference_mode():
                batch = self._read(prompts, indices, keep)[0]
            yield batch

    @torch.inference_mode()
    def next_hidden(self, tokens: torch.Tensor, lengths: torch.Tensor, longest: int, cache: SlotCache) -> torch.Tensor:
        """Add one token per row (``tokens`` [rows]) to the cache; return the hidden state [rows, hidden] after it."""
        step = TokenPass(cache, lengths, longest)
        return self._forward(tokens[:, None], lengths[:, None], step)[:, 0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocabulary] of hidden states [..., hidden]."""
        return self.module.get_output_embeddings()(hidden)

    @torch.inference_mode()
    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it, at temperature 1; the first token's is 0.0."""
        scores: list[list[float]] = [[] for _ in sequences]
        for indices in plan_batches([len(s) for s in sequences]):
            _, hidden, ids = self._read(sequences, indices, keep=False)
            rows = self._score_rows(hidden[:, :-1], ids[:, 1:])
            if not bool(torch.isfinite(rows).all()):
                raise WeightMismatchError("the served weights produce log-probs that are not finite")
            for index, row in zip(indices, rows.tolist(), strict=True):
                scores[index] = [0.0, *row[: len(sequences[index]) - 1]]
        return scores

    def _score_rows(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Log-probs [rows, tokens], computed in pieces so that [tokens, vocabulary] stays bounded."""
        flat_hidden, flat_targets = hidden.flatten(0, 1), targets.flatten()
        size = self.rows_a_piece
        pieces = [
            self.logits(part).float().log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
            for part, target in zip(flat_hidden.split(size), flat_targets.split(size), strict=True)
        ]
        return torch.cat(pieces).view(targets.shape) if pieces else hidden.new_zeros(targets.shape)

    def _read(
        self, sequences: Sequence[list[int]], indices: list[int], keep: bool
    ) -> tuple[PromptBatch, torch.Tensor, torch.Tensor]:
        """Forward the sequences at ``indices`` as one right-padded batch: (batch, hidden states, ids)."""
        lengths = torch.tensor([len(sequences[i]) for i in indices], device=self.device)
        longest = max(len(sequences[i]) for i in indices)
        ids = torch.tensor([sequences[i] + [0] * (longest - len(sequences[i])) for i in indices], device=self.device)
        prompt_pass = PromptPass(keep)
        hidden = self._forward(ids, torch.arange(longest, device=self.device)[None], prompt_pass)
        last = hidden[torch.arange(len(indices), device=self.device), lengths - 1]
        return PromptBatch(indices, last, prompt_pass), hidden, ids

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, attention_pass: AttentionPass) -> torch.Tensor:
        body = self.module.base_model
        return body(
            input_ids=ids, position_ids=positions, use_cache=False, attention_pass=attention_pass
        ).last_hidden_state

    @torch.inference_mode()
    def _use_slot_attention(self, folder: Path) -> None:
        """Switch to the engine's own attention; UserError if the model's log-probs change.

        This detects architectures that the engine does not support: scaled or capped logits, attention sinks, position
        biases, recurrent layers.
        """
        ids = torch.arange(CHECK_TOKENS, device=self.device)[None] % self.vocabulary
        positions = torch.arange(CHECK_TOKENS, device=self.device)[None]
        try:
            expected = self.module(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
            own_head = self.logits(self._forward(ids, positions, PromptPass(keep=False)))
            self.module.set_attn_implementation(ATTENTION_NAME)
            own_attention = self.logits(self._forward(ids, positions, PromptPass(keep=False)))
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(f"model folder {folder}: the transformers engine cannot run it: {error}") from error
        for part, logits in (("output head", own_head), ("attention", own_attention)):
            delta = (logits.float().log_softmax(-1) - expected).abs().mean().item()
            if not delta <= CHECK_TOLERANCE[self.dtype]:
                raise UserError(
                    f"model folder {folder}: the transformers engine does not compute the {part} of "
                    f"{type(self.module).__name__} (log-probs differ by {delta:.3g} from the model's own forward pass)"
                )


def plan_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of ``lengths`` in groups of similar length, within the limits ``PADDING_WASTE`` and ``PROMPT_TOKENS``."""
    groups: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        real += length
        padded = length * (len(groups[-1]) + 1) if groups else 0
        if groups and padded <= min(PROMPT_TOKENS, real * (1 + PADDING_WASTE)):
            groups[-1].append(index)
        else:
            groups.append([index])
            real = length
    return groups


def _max_positions(config: Any) -> int:
    """The longest sequence that is computed alike alone and in a batch.

    Above its original length ``longrope`` rotates all rows of a pass by other frequencies, also the short ones and
    those whose keys are in the cache.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    limits = [each["original_max_position_embeddings"] for each in kinds if each.get("rope_type") == "longrope"]
    return int(min([config.max_position_embeddings, *limits]))


def _cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * dtype.itemsize)
